//! The options of verbs that speak with a registry.

use std::path::PathBuf;

use cryopod_archive::source::Source;
use cryopod_registry::{Login, RegistryOptions, Transferred, parse_reference};

use crate::archives::signature::Signature;
use crate::terminal::ui;

/// Options for a registry.
#[derive(clap::Args, Clone)]
pub struct RegistryArgs {
    /// false: accept any certificate, and plain HTTP if there is no TLS.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    tls_verify: bool,
    /// USER:PASSWORD; otherwise those of podman's or docker's auth file.
    #[arg(long, value_parser = credentials)]
    creds: Option<Login>,
    /// The auth file, instead of $REGISTRY_AUTH_FILE and the usual ones.
    #[arg(long)]
    authfile: Option<PathBuf>,
    /// Print nothing while it runs.
    #[arg(short, long)]
    quiet: bool,
}

fn credentials(text: &str) -> Result<Login, String> {
    Login::parse(text).ok_or_else(|| "USER:PASSWORD".into())
}

/// Those of a verb with a `--quiet` of its own.
#[derive(clap::Args)]
pub struct RegistryAccess {
    /// For docker://; false: accept any certificate, and plain HTTP if there is no TLS.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    tls_verify: bool,
    /// The auth file, instead of $REGISTRY_AUTH_FILE and the usual ones.
    #[arg(long)]
    authfile: Option<PathBuf>,
}

impl RegistryAccess {
    /// Returns them with the verb's own `--quiet`.
    pub fn with(&self, quiet: bool) -> RegistryArgs {
        RegistryArgs {
            tls_verify: self.tls_verify,
            creds: None,
            authfile: self.authfile.clone(),
            quiet,
        }
    }
}

impl RegistryArgs {
    /// Returns true if only errors are printed.
    pub fn quiet(&self) -> bool {
        self.quiet
    }

    pub fn options(&self) -> RegistryOptions {
        RegistryOptions {
            tls_verify: self.tls_verify,
            credentials: self.creds.clone(),
            auth_file: self.authfile.clone(),
            ..RegistryOptions::default()
        }
    }

    /// Pushes an image, shows progress, and reports what was sent.
    pub fn push(&self, source: &Source, image: &str) -> anyhow::Result<()> {
        let to = parse_reference(image)?;
        let options = self.options();
        let done = ui::with_progress("push", self.quiet, &options.progress, || {
            cryopod_registry::push(source, &to, &options)
        })?;
        if let Some(signature) = Signature::read(source.path())? {
            signature.push(&to, &options)?;
        }
        if !self.quiet {
            println!("{}", said(&to.to_string(), "sent", &done));
        }
        Ok(())
    }
}

/// Formats what a transfer moved, and the digest.
pub fn said(place: &str, verb: &str, done: &Transferred) -> String {
    let there = match done.skipped {
        0 => String::new(),
        n => format!(", {n} were there"),
    };
    format!(
        "{place}: {} {verb} in {} blobs{there}\n{}",
        ui::bytes(done.bytes),
        done.blobs - done.skipped,
        done.digest
    )
}
