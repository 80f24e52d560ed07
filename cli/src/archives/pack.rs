//! `cryopod pack`: packs a checkpoint into one portable archive, or makes an archive of another kind of one.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::limits::MAX_JSON_BYTES;
use cryopod_archive::format::oci::media;
use cryopod_archive::pack::{Destination, PackOptions, Packed, pack};
use cryopod_archive::source::Source;
use cryopod_archive::{Compression, container::engine};

use crate::archives::confined::identities;
use crate::archives::registry_args::{RegistryAccess, RegistryArgs};
use crate::archives::signature::{self, Signature};
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::numbers;
use crate::terminal::ui;
use cryopod_archive::source::ArchivePlace;
use cryopod_operations::config::Config;
use cryopod_operations::config::restore::REGISTRY;
use cryopod_registry::parse_reference;

#[derive(clap::Args)]
pub struct Args {
    /// The checkpoint: a directory of CRIU images, or an archive: podman's export file, an exported containerd
    /// checkpoint, a Kubernetes checkpoint file, oci:DIR[:NAME] or oci-archive:FILE.
    source: String,
    /// The output: oci:DIR, oci-archive:FILE, docker://REGISTRY/REPOSITORY:TAG, or a file for `podman container restore
    /// --import` (.tar, .tar.gz, else zstd).
    #[arg(short, long)]
    output: String,
    #[command(flatten)]
    how: PackMethod,
    #[command(flatten)]
    registry: RegistryAccess,
}

/// Options for writing an archive.
#[derive(clap::Args, Clone)]
pub struct PackMethod {
    /// Compression of an image's layers: zstd, gzip or none.
    #[arg(long, default_value = "zstd", value_parser = compression)]
    compression: Compression,
    /// The zstd level, -7 to 19, or the gzip level, 1 to 9.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    level: i32,
    /// Threads that compress, up to 32; 0: one per core, at most 16. The result does not depend on it.
    #[arg(long, default_value_t = 0, value_parser = numbers::threads)]
    threads: usize,
    /// Put all files into one layer.
    #[arg(long)]
    single_layer: bool,
    /// The image's name in the layout, as in `localhost/job:1`.
    #[arg(long)]
    name: Option<String>,
    /// KEY=VALUE: an annotation of the image; may be given several times.
    #[arg(long = "annotation", value_parser = annotation)]
    annotations: Vec<(String, String)>,
    /// Encrypt an image for this recipient: age1..., a public key of SSH, or a file with some; may be given several
    /// times. Without it, for those of the configuration.
    #[arg(long, value_name = "RECIPIENT|FILE")]
    encrypt_to: Vec<String>,
    /// Do not encrypt, whatever the configuration says.
    #[arg(long, conflicts_with = "encrypt_to")]
    no_encrypt: bool,
    /// Sign an image with this private key of P-256: PKCS #8 (PEM), or cosign's with COSIGN_PASSWORD.
    #[arg(long, value_name = "KEY")]
    sign_by: Option<PathBuf>,
    /// The image that is signed, instead of `name`.
    #[arg(skip)]
    reference: Option<String>,
    /// Replace an existing output.
    #[arg(long)]
    replace: bool,
    /// Print nothing while it runs.
    #[arg(short, long)]
    quiet: bool,
    /// Standard output is for the archive.
    #[arg(skip)]
    unsaid: bool,
}

fn compression(text: &str) -> Result<Compression, String> {
    match text {
        "zstd" => Ok(Compression::Zstd),
        "gzip" => Ok(Compression::Gzip),
        "none" => Ok(Compression::None),
        _ => Err("zstd, gzip or none".into()),
    }
}

fn annotation(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err("KEY=VALUE".into()),
    }
}

impl PackMethod {
    /// The defaults of the command line, without encryption.
    pub fn plain(quiet: bool) -> Self {
        Self {
            compression: Compression::Zstd,
            level: 1,
            threads: 0,
            single_layer: false,
            name: None,
            annotations: Vec::new(),
            encrypt_to: Vec::new(),
            no_encrypt: true,
            sign_by: None,
            reference: None,
            replace: false,
            quiet,
            unsaid: false,
        }
    }

    /// The same, encrypted as the configuration says.
    pub fn configured(mut self) -> Self {
        self.no_encrypt = false;
        self
    }

    pub fn named(mut self, name: Option<&str>) -> Self {
        self.name = name.map(str::to_owned);
        self
    }

    /// The same, for an image that goes to a registry.
    pub fn to_be(&self, image: &str) -> Self {
        Self {
            reference: Some(image.to_owned()),
            ..self.clone()
        }
    }

    /// The same, and prints nothing on standard output at the end.
    #[must_use]
    pub fn silent(&self) -> Self {
        Self {
            unsaid: true,
            ..self.clone()
        }
    }

    /// Like [`PackMethod::write`], but does not report what was written.
    pub fn write_silently(
        &self,
        what: &str,
        source: &Source,
        to: &Destination,
    ) -> anyhow::Result<Packed> {
        self.pack(what, source, to, completed(source)?)
    }

    fn pack(
        &self,
        what: &str,
        source: &Source,
        to: &Destination,
        extra_files: BTreeMap<String, Vec<u8>>,
    ) -> anyhow::Result<Packed> {
        let options = self.options(extra_files)?;
        let packed = ui::with_progress(what, self.quiet, &options.progress, || {
            pack(source, to, &options)
        })?;
        if let (Some(key), Some(digest)) = (&self.sign_by, &packed.digest) {
            let named = self.reference.as_ref().or(self.name.as_ref());
            let named = named.map_or("", String::as_str);
            Signature::sign(key, named, digest)?.write(to.path())?;
        }
        Ok(packed)
    }

    /// 0: one per core.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Returns true if only errors are printed.
    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// Checks that the destination may be written as it is wished.
    pub fn check(&self, to: &Destination) -> anyhow::Result<()> {
        if let Some(key) = &self.sign_by {
            signature::signing_key(key)?;
            if matches!(to, Destination::Tar(..)) {
                bail!(
                    "{}: an engine's own file cannot be signed; oci:DIR and oci-archive:FILE can",
                    to.path().display()
                );
            }
        }
        Ok(self.options(BTreeMap::new())?.check(to)?)
    }

    /// Builds the library's options, with files that complete the source's.
    pub fn options(&self, extra_files: BTreeMap<String, Vec<u8>>) -> anyhow::Result<PackOptions> {
        let recipients = match self.no_encrypt {
            true => None,
            false => Config::load()?.encrypt.recipients(&self.encrypt_to)?,
        };
        Ok(PackOptions {
            recipients,
            level: self.level,
            compression: self.compression,
            threads: self.threads,
            single_layer: self.single_layer,
            annotations: self.annotations.iter().cloned().collect(),
            name: self.name.clone(),
            extra_files,
            replace: self.replace,
            ..PackOptions::default()
        })
    }

    /// Packs, shows progress, and reports what was written.
    pub fn write(
        &self,
        what: &str,
        source: &Source,
        to: &Destination,
        extra_files: BTreeMap<String, Vec<u8>>,
    ) -> anyhow::Result<Packed> {
        let packed = self.pack(what, source, to, extra_files)?;
        self.say(to, &packed);
        Ok(packed)
    }

    pub fn say(&self, to: &Destination, packed: &Packed) {
        if !self.quiet && !self.unsaid {
            say(to, packed);
        }
    }
}

fn say(to: &Destination, packed: &Packed) {
    let ratio = packed.content_bytes as f64 / packed.stored_bytes.max(1) as f64;
    let mut text = format!(
        "{}: {} stored as {} (ratio {ratio:.2})",
        to.path().display(),
        ui::bytes(packed.content_bytes),
        ui::bytes(packed.stored_bytes),
    );
    if !packed.layers.is_empty() {
        text.push_str(&format!(" in {} layers", packed.layers.len()));
    }
    if let Some(digest) = &packed.digest {
        text.push_str(&format!("\n{digest}"));
    }
    println!("{text}");
}

/// Parses a destination on disk. Refuses a registry's name.
pub fn destination(text: &str) -> anyhow::Result<Destination> {
    if text.starts_with(REGISTRY) {
        bail!("{text}: a registry; pack to oci:DIR and send that with `cryopod push DIR {text}`");
    }
    Ok(Destination::parse(text))
}

/// Builds the files that a source lacks and other engines want: containerd's own checkpoint has its record in another
/// form.
pub fn completed(source: &Source) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let Some(parts) = source.containerd() else {
        return Ok(BTreeMap::new());
    };
    let record = parts
        .records
        .iter()
        .find(|d| d.media_type == media::CONTAINERD_CONFIG && d.size <= MAX_JSON_BYTES);
    let Some(descriptor) = record else {
        return Ok(BTreeMap::new());
    };
    let mut record = Vec::new();
    source
        .blob(descriptor)?
        .read_to_end(&mut record)
        .with_context(|| source.path().display().to_string())?;
    let name = descriptor.digest.to_string();
    let found = Digest::of(&record);
    if found != descriptor.digest {
        bail!(
            "{}: blob {name}: its content has the digest {found}",
            source.path().display()
        );
    }
    engine::files_of_containerd(&name, &record, &parts.index.annotations)
        .with_context(|| source.path().display().to_string())
}

/// Runs `cryopod pack`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let image = args.output.strip_prefix(REGISTRY);
    if let Some(image) = image {
        parse_reference(image)?;
    }
    let source = ArchivePlace::parse(&args.source).open(&identities()?)?;
    match image {
        Some(image) => {
            let registry = args.registry.with(args.how.quiet());
            to_registry(&source, image, &args.how, &registry)?;
        }
        None => {
            let to = destination(&args.output)?;
            args.how.check(&to)?;
            let packed = args.how.write("pack", &source, &to, completed(&source)?)?;
            warn_of_store(&packed);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn warn_of_store(packed: &Packed) {
    if packed.refers {
        eprintln!(
            "cryopod: the large files are in a store, and what was made only refers to them; `cryopod bundle` makes an archive that has them"
        );
    }
}

/// Packs an image in a temporary directory and pushes it.
pub fn to_registry(
    source: &Source,
    image: &str,
    how: &PackMethod,
    registry: &RegistryArgs,
) -> anyhow::Result<()> {
    parse_reference(image)?;
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let layout = temp.path().join("image");
    let to = Destination::Layout(layout.clone());
    how.check(&to)?;
    warn_of_store(&how.to_be(image).write_silently("pack", source, &to)?);
    registry.push(&Source::open(&layout)?, image)
}
