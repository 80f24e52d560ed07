//! `cryopod check`: reports whether containers can be checkpointed on this host. Each fact has a line, with the remedy
//! where something is missing. Exits with 1 if a checkpoint could not work.
//!
//! `cryopod check ARCHIVE`: reports whether this checkpoint would restore here. See [`archive`].

mod archive;
mod criu;
mod engine;
mod host;
mod tested;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cryopod_host::files::Host;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_operations::config::Config;
use cryopod_operations::criu::program;
use serde::Serialize;

const LIMIT: Duration = Duration::from_secs(30);

/// What the checks look at.
struct CheckInput<'a> {
    /// The CRIU on PATH, which need not be the one that is used.
    pub hosts_own: Option<PathBuf>,
    pub host: &'a Host,
    pub tools: &'a dyn Tools,
    pub root: bool,
    pub has_library: &'a dyn Fn(&str) -> bool,
}

#[derive(clap::Args)]
pub struct Args {
    /// A checkpoint to check: an engine's export file, a directory, an OCI layout. Would it restore on this host? Exit
    /// code 0: yes, 1: no, 2: not a readable checkpoint. Without it: shows what this host can do.
    path: Option<PathBuf>,
    /// Where its GPUs go: `auto`, or OLD=NEW[,OLD=NEW...].
    #[arg(long, requires = "path")]
    map: Option<String>,
    /// A check that reports without blocking the restore; may be given several times.
    #[arg(long, requires = "path", value_name = "CHECK")]
    off: Vec<String>,
    /// The name of the image, if an OCI layout holds several.
    #[arg(long, requires = "path")]
    image: Option<String>,
    /// The engine for the restore, if not the one that made the checkpoint.
    #[arg(short, long, requires = "path", value_enum)]
    engine: Option<crate::engines::engine::Engine>,
    /// Assume that podman restores with --ignore-volumes, and uses the volumes of this host.
    #[arg(long, requires = "path")]
    ignore_volumes: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckStatus {
    Ok,
    /// Missing, or slower than necessary; a checkpoint works without it.
    Note,
    /// A checkpoint could not work.
    Missing,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportLine {
    pub name: &'static str,
    pub status: CheckStatus,
    pub found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl ReportLine {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: CheckStatus::Ok,
            found: found.into(),
            remedy: None,
        }
    }

    fn note(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status: CheckStatus::Note,
            remedy: Some(remedy.into()),
            ..Self::ok(name, found)
        }
    }

    fn missing(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status: CheckStatus::Missing,
            ..Self::note(name, found, remedy)
        }
    }
}

#[derive(Serialize)]
struct CheckReport<'a> {
    ok: bool,
    checks: &'a [ReportLine],
}

/// Runs `cryopod check`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.path {
        return archive::run(&archive::ArchiveQuestion {
            path,
            image: args.image.as_deref(),
            map: args.map.as_deref(),
            off: &args.off,
            engine: args.engine,
            ignore_volumes: args.ignore_volumes,
            json: args.json,
        });
    }
    let config = Config::load();
    let hosts_own = SystemTools::from_env().find("criu");
    if let Ok(config) = &config {
        program::prefer_over_host(config);
    }
    let input = CheckInput {
        hosts_own,
        host: &Host::system(),
        tools: &SystemTools::from_env(),
        root: nix::unistd::geteuid().is_root(),
        has_library: &host::can_load,
    };
    let lines = host::check(&input, config);
    let ok = lines.iter().all(|l| l.status != CheckStatus::Missing);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &CheckReport { ok, checks: &lines })?;
        writeln!(out)?;
    } else {
        out.write_all(table(&lines).as_bytes())?;
        let verdict = if ok {
            "A container can be checkpointed on this host."
        } else {
            "A checkpoint cannot work on this host yet: see the lines marked `missing`."
        };
        writeln!(out, "\n{verdict}")?;
    }
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn table(lines: &[ReportLine]) -> String {
    let width = lines.iter().map(|l| l.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for line in lines {
        let status = match line.status {
            CheckStatus::Ok => "ok",
            CheckStatus::Note => "note",
            CheckStatus::Missing => "missing",
        };
        text.push_str(&format!(
            "{status:<8}{:<width$}  {}\n",
            line.name, line.found
        ));
        if let Some(remedy) = &line.remedy {
            text.push_str(&format!("{:<8}{:<width$}  -> {remedy}\n", "", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;

    use cryopod_host::programs::{Output, ToolError};

    use super::*;

    /// Programs by name, with a fixed output.
    pub struct Says(pub &'static [(&'static str, &'static str)]);
    impl Tools for Says {
        fn find(&self, name: &str) -> Option<PathBuf> {
            self.0
                .iter()
                .any(|(n, _)| *n == name)
                .then(|| Path::new("/bin").join(name))
        }
        fn output(&self, program: &Path, _: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
            let said = self
                .0
                .iter()
                .find(|(n, _)| program.ends_with(n))
                .map_or("", |(_, s)| s);
            Ok(Output {
                code: 0,
                stdout: said.into(),
                stderr: String::new(),
            })
        }
    }
}
