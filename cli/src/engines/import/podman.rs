//! Restores an archive with podman at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_archive::pack::Destination;
use cryopod_archive::source::{Kind, Source};
use cryopod_archive::unpack::UnpackOptions;
use cryopod_archive::vram::places;
use cryopod_archive::{Compression, format::names};
use cryopod_operations::images::handover::Ticket;

use super::{Args, ImportRecords, without_image};
use crate::archives::confined;
use crate::engines::carried;
use crate::engines::engine::EngineCall;
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::ui::Steps;

const ASK: Duration = Duration::from_secs(60);

pub fn restore(
    args: &Args,
    source: &Source,
    records: &ImportRecords,
    steps: &mut Steps,
) -> anyhow::Result<String> {
    if let Some(parts) = ImportParts::unpack(args, source, records)? {
        steps.done("unpack");
        let file = parts.small_file(args)?;
        let restored = import(args, &file);
        steps.done("podman container restore");
        match restored {
            Ok(id) if args.map.is_some() && !parts.ticket.is_redeemed() => bail!(
                "{id}: restored, but without --map: podman's runtime for it is not cryopod-runtime; remove it and import again with that runtime"
            ),
            // A runtime other than cryopod's does not know where the large files are.
            Err(error) if args.map.is_none() && !parts.ticket.is_redeemed() => {
                tracing::debug!("the runtime took no ticket: {error:#}");
            }
            other => return other,
        }
    }
    if args.map.is_some() {
        bail!(
            "--map: only root can give one, and only for a checkpoint that cryopod's runtime has recorded ({})",
            names::METADATA
        );
    }
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let file = match source.kind() {
        _ if records.image => {
            let file = temp.path().join("checkpoint.tar");
            let source = without_image(args, source, temp.path())?;
            args.write(&source, &Destination::Tar(file.clone(), Compression::None))?;
            steps.done("podman's file");
            file
        }
        Kind::PodmanTar(_) => fs::canonicalize(source.path())?,
        _ => {
            let file = temp.path().join("checkpoint.tar");
            args.write(source, &Destination::Tar(file.clone(), Compression::None))?;
            steps.done("podman's file");
            file
        }
    };
    let restored = import(args, &file);
    steps.done("podman container restore");
    restored
}

fn import(args: &Args, file: &Path) -> anyhow::Result<String> {
    let name = args.name.iter().flat_map(|name| ["--name", name]);
    let said = args
        .call("podman")
        .args(["container", "restore", "--import"])
        .args([file])
        .args(name)
        .run()?;
    Ok(said.trim().to_owned())
}

/// A checkpoint whose small files go to podman, and whose large files go to cryopod's runtime. Shards that it can read in
/// the archive stay there.
struct ImportParts {
    whole: PathBuf,
    ticket: Ticket,
    /// On podman's file system.
    temp: LockedTempDir,
}

impl ImportParts {
    /// `None` if podman is to get all files.
    fn unpack(
        args: &Args,
        source: &Source,
        records: &ImportRecords,
    ) -> anyhow::Result<Option<Self>> {
        // Only root's tickets are valid.
        if !nix::unistd::geteuid().is_root() || !records.ours {
            return Ok(None);
        }
        let root = EngineCall::new("podman", ASK)
            .args(["info", "--format", "{{.Store.GraphRoot}}"])
            .run()?;
        let temp = LockedTempDir::within(Path::new(root.trim()), Holds::Copy)?;
        let whole = temp.path().join("whole");
        let shards = confined::shards_in_place(source)?;
        let options = UnpackOptions {
            leave: shards.iter().map(|s| (s.name.clone(), s.bytes)).collect(),
            ..UnpackOptions::default()
        };
        confined::unpack(args.quiet, source, &whole, &options)?;
        carried::take(&whole, args.limit())?;
        let images = whole.join(names::CHECKPOINT_DIR);
        let ticket = Ticket::issue(&images, temp.path())?;
        if !shards.is_empty() {
            places::write(&images, &shards, &ticket.entry).with_context(|| {
                let path = source.path().display();
                format!("{path}: incomplete: it has GPU memory, and not the table of it")
            })?;
        }
        if let Some(map) = &args.map {
            ticket.ask_for_map(&map.0)?;
        }
        Ok(Some(Self {
            whole,
            ticket,
            temp,
        }))
    }

    /// Writes podman's file, with a ticket instead of the large files.
    fn small_file(&self, args: &Args) -> anyhow::Result<PathBuf> {
        let file = self.temp.path().join("checkpoint.tar");
        let small = Source::open(&self.whole)?;
        args.write(&small, &Destination::Tar(file.clone(), Compression::None))?;
        Ok(file)
    }
}
