//! `cryopod cache pull`: brings a checkpoint into the cache.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::names;
use cryopod_archive::source::{ArchivePlace, Kind, Source};
use cryopod_archive::unpack::UnpackOptions;
use cryopod_operations::config::Config;
use cryopod_operations::config::restore::REGISTRY;
use cryopod_operations::rootfs;
use cryopod_registry::{RegistryOptions, parse_reference};

use super::directory::{Cache, CacheOrigin};
use super::known::InCache;
use crate::archives::confined;
use crate::archives::signature::{self, Signature, repository_of};
use crate::terminal::ui;

#[derive(clap::Args)]
pub struct Args {
    /// docker://REGISTRY/REPOSITORY@DIGEST or :TAG, oci:DIR[:NAME], oci-archive:FILE[:NAME], or an archive file.
    source: String,
    /// Print only the directory of CRIU's images.
    #[arg(short, long)]
    quiet: bool,
    /// An image of a registry must be signed by this key (default: restore.keys). Repeatable.
    #[arg(long, value_name = "KEY")]
    signed_by: Vec<PathBuf>,
}

/// Runs `cryopod cache pull`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut config = Config::load()?;
    if !args.signed_by.is_empty() {
        config.restore.keys = args.signed_by.clone();
    }
    let cache = Cache::open(&config.cache)?;
    let pull = Pull {
        args,
        config: &config,
    };
    let images = match args.source.starts_with(REGISTRY) {
        true => pull.image(&cache)?,
        false => pull.archive(&cache)?,
    };
    println!("{}", images.display());
    Ok(ExitCode::SUCCESS)
}

struct Pull<'a> {
    args: &'a Args,
    config: &'a Config,
}

impl Pull<'_> {
    fn image(&self, cache: &Cache) -> anyhow::Result<PathBuf> {
        let source = &self.args.source;
        let image = parse_reference(source)?;
        let options = RegistryOptions {
            tls_verify: !self.config.cache.is_insecure(image.registry()),
            ..RegistryOptions::default()
        };
        let digest = match image.digest() {
            Some(digest) => Digest::parse(digest)?,
            None => cryopod_registry::digest(&image, &options)?,
        };
        let origin = CacheOrigin {
            place: format!("{REGISTRY}{}/{}", image.registry(), image.repository()),
            digest,
        };
        let repository = repository_of(&image);
        signature::require(
            &self.config.restore,
            &origin.digest,
            Some(&repository),
            || Signature::fetch(&image, &origin.digest, &options),
        )?;
        if let Some(images) = cache.find(&origin) {
            return Ok(images);
        }
        self.make(cache, &origin, |work| {
            let layout = work.join("image");
            if !layout.exists() {
                let exact = image.clone_with_digest(origin.digest.to_string());
                let known = InCache::of(cache, &origin.place);
                ui::with_progress("pull", self.args.quiet, &options.progress, || {
                    cryopod_registry::pull_with(&exact, &layout, &options, &known)
                })?;
            }
            let made = Source::open(&layout)
                .map_err(anyhow::Error::from)
                .and_then(|mut pulled| {
                    pulled.unlock(&self.config.encrypt.identities());
                    self.unpack(&pulled, work)
                });
            fs::remove_dir_all(&layout)?;
            made
        })
    }

    fn archive(&self, cache: &Cache) -> anyhow::Result<PathBuf> {
        let source =
            ArchivePlace::parse(&self.args.source).open(&self.config.encrypt.identities())?;
        signature::require_beside(&self.config.restore, &source)?;
        let digest = match source.image() {
            Some(image) => image.digest.clone(),
            None => identity(&source)?,
        };
        let path = fs::canonicalize(source.path())?;
        let origin = CacheOrigin {
            // Without loss, for a path that is no text.
            place: format!("{path:?}"),
            digest,
        };
        if let Some(images) = cache.find(&origin) {
            return Ok(images);
        }
        self.make(cache, &origin, |work| self.unpack(&source, work))
    }

    fn make(
        &self,
        cache: &Cache,
        origin: &CacheOrigin,
        make: impl FnOnce(&Path) -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<PathBuf> {
        let limit = self.config.limits.restore(0);
        cache.make(origin, &self.args.source, limit, make)
    }

    /// Unpacks it below `work`, with the container's changes of files where a restore takes them from.
    fn unpack(&self, source: &Source, work: &Path) -> anyhow::Result<PathBuf> {
        let made = work.join("unpacked");
        // Complete, but not yet in the cache when its process was killed.
        let _ = fs::remove_dir_all(&made);
        confined::unpack(self.args.quiet, source, &made, &UnpackOptions::default())?;
        let images = made.join(names::CHECKPOINT_DIR);
        if !images.join(names::CRIU_INVENTORY).is_file() {
            bail!("{}: it has no images of CRIU", self.args.source);
        }
        rootfs::adopt(&self.config.rootfs, &made, &images)?;
        Ok(made)
    }
}

/// Identifies an archive without a digest by its file: path, inode, size and times. Reading all of it would take as long
/// as to unpack it.
fn identity(source: &Source) -> anyhow::Result<Digest> {
    if matches!(
        source.kind(),
        Kind::Directory | Kind::CriuDirectory | Kind::Containerd { archive: false }
    ) {
        bail!(
            "{}: a {} needs no cache: name CRIU's image directory itself, or an archive",
            source.path().display(),
            source.kind()
        );
    }
    let path = fs::canonicalize(source.path())?;
    let m = File::open(&path)?.metadata()?;
    let text = format!(
        "{path:?} {} {} {} {}.{} {}.{}",
        m.dev(),
        m.ino(),
        m.size(),
        m.mtime(),
        m.mtime_nsec(),
        m.ctime(),
        m.ctime_nsec()
    );
    Ok(Digest::of(text.as_bytes()))
}
