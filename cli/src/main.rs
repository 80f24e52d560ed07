//! `cryopod`: the command line for GPU container checkpoints. Each subcommand has a file.

// The comments on arguments are the command's help, where `[:NAME]` is no link.
#![allow(rustdoc::broken_intra_doc_links)]

mod activity;
mod archives;
mod cache;
mod check;
mod engines;
mod generate;
mod gpu_memory;
mod inspect;
mod kubernetes;
mod setup;
mod store;
mod temp_dir;
mod terminal;

use std::any::Any;
use std::panic;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use activity::{metrics, top};
use archives::{bundle, flatten, pack, pull, push, unpack, verify};
use clap::{Parser, Subcommand};
use cryopod_archive::format::text::printable;
use cryopod_host::processes::signals::keep_children;
use cryopod_operations::run::metrics as counts;
use engines::{export, import, migrate};
use gpu_memory::{resume, suspend};
use kubernetes::{installer, nri, plugin};

/// Checkpoints and restores GPU containers.
#[derive(Parser)]
#[command(name = "cryopod", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what this host can do and what is missing, or whether a checkpoint would restore here.
    Check(check::Args),
    /// Packs a checkpoint into an archive.
    Pack(pack::Args),
    /// Unpacks an archive into a directory.
    Unpack(unpack::Args),
    /// Reads a whole archive and verifies it.
    Verify(verify::Args),
    /// Makes a self-contained archive of a checkpoint whose large files are in a store.
    Bundle(bundle::Args),
    /// Makes a checkpoint self-contained whose GPU memory builds on earlier ones.
    Flatten(flatten::Args),
    /// Shows what a checkpoint holds.
    Inspect(inspect::Args),
    /// Checkpoints a container through its engine, and makes an archive of it.
    Export(export::Args),
    /// Moves a running container to another host over ssh.
    Migrate(migrate::Args),
    /// Moves a container's GPU memory to host memory or into files, and leaves it there.
    Suspend(suspend::Args),
    /// Moves a suspended container's GPU memory back to its GPUs.
    Resume(resume::Args),
    /// Hands an archive to an engine.
    Import(import::Args),
    /// The unpacked checkpoints from which containers are created on this host.
    #[command(subcommand)]
    Cache(cache::Args),
    /// The stores of this host, with the large files of checkpoints.
    #[command(subcommand)]
    Store(store::Args),
    /// Prints counts, times and failures of this host's operations for Prometheus.
    Metrics(metrics::Args),
    /// Shows the checkpoints, restores and transfers that are running.
    Top(top::Args),
    /// Pushes an image to a registry.
    Push(push::Args),
    /// Pulls an image from a registry.
    Pull(pull::Args),
    /// Makes cryopod known to podman, docker, containerd or Kubernetes, or takes that back.
    Setup(setup::Args),
    /// Writes man pages and completions.
    #[command(hide = true)]
    Generate(generate::Args),
    /// What the pods of the Kubernetes chart do.
    #[command(hide = true, subcommand)]
    Installer(installer::Args),
}

fn main() -> ExitCode {
    keep_children();
    while_read(|| match run() {
        Ok(code) => code,
        Err(error) => {
            // The message may hold names from archives and containers.
            eprintln!("Error: {}", printable(&one_line(&error)));
            ExitCode::FAILURE
        }
    })
}

/// Ends without a message where nobody reads the output any more (`| head`), for which `println!` panics. SIGPIPE would
/// also end this program for a socket or a child.
fn while_read(run: fn() -> ExitCode) -> ExitCode {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !is_unread(info.payload()) {
            usual(info);
        }
    }));
    panic::catch_unwind(run).unwrap_or_else(|panicked| match is_unread(&*panicked) {
        true => ExitCode::from(128 + 13), // as by SIGPIPE
        false => panic::resume_unwind(panicked),
    })
}

fn is_unread(panicked: &(dyn Any + Send)) -> bool {
    let text = panicked.downcast_ref::<String>();
    text.is_some_and(|t| t.starts_with("failed printing to std") && t.contains("Broken pipe"))
}

fn run() -> anyhow::Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("CRYOPOD_LOG").unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new("cryopod=warn,cryopod_registry=warn")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .init();
    let called_as = std::env::args_os().next().map(PathBuf::from);
    if called_as.is_some_and(|path| path.file_name() == Some(plugin::NAME.as_ref())) {
        return plugin::run();
    }
    if std::env::var_os(nri::SOCKET).is_some() && std::env::args_os().len() == 1 {
        return nri::run();
    }
    let command = Cli::parse().command;
    let Some(operation) = command.counted() else {
        return command.run();
    };
    let started = Instant::now();
    let done = command.run();
    if done.is_err() {
        counts::failed(counts::FailureReason::Other);
    }
    counts::count(operation, started.elapsed(), done.is_ok());
    done
}

impl Command {
    /// The name by which `cryopod metrics` counts it; `None` for what only looks.
    fn counted(&self) -> Option<&'static str> {
        match self {
            Self::Pack(_) => Some("pack"),
            Self::Unpack(_) => Some("unpack"),
            Self::Verify(_) => Some("verify"),
            Self::Bundle(_) => Some("bundle"),
            Self::Flatten(_) => Some("flatten"),
            Self::Export(_) => Some("export"),
            Self::Import(_) => Some("import"),
            Self::Suspend(_) => Some("suspend"),
            Self::Resume(_) => Some("resume"),
            Self::Push(_) => Some("push"),
            Self::Pull(_) => Some("pull"),
            Self::Cache(cache::Args::Pull(_)) => Some("cache_pull"),
            Self::Check(_) | Self::Inspect(_) | Self::Cache(_) | Self::Store(_) => None,
            Self::Metrics(_) | Self::Top(_) | Self::Setup(_) | Self::Generate(_) => None,
            Self::Installer(_) => None,
            // What it runs is counted.
            Self::Migrate(_) => None,
        }
    }

    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Check(args) => check::run(&args),
            Self::Pack(args) => pack::run(&args),
            Self::Unpack(args) => unpack::run(&args),
            Self::Verify(args) => verify::run(&args),
            Self::Bundle(args) => bundle::run(&args),
            Self::Flatten(args) => flatten::run(&args),
            Self::Inspect(args) => inspect::run(&args),
            Self::Export(args) => export::run(&args),
            Self::Suspend(args) => suspend::run(&args),
            Self::Resume(args) => resume::run(&args),
            Self::Import(args) => import::run(&args),
            Self::Migrate(args) => migrate::run(&args),
            Self::Cache(args) => cache::run(&args),
            Self::Store(args) => store::run(&args),
            Self::Metrics(args) => metrics::run(&args),
            Self::Top(args) => top::run(&args),
            Self::Push(args) => push::run(&args),
            Self::Pull(args) => pull::run(&args),
            Self::Setup(args) => setup::run(&args),
            Self::Generate(args) => generate::run(&args),
            Self::Installer(args) => installer::run(args),
        }
    }
}

/// Joins an error with its causes. A cause that the text names already is left out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use anyhow::anyhow;
    use clap::CommandFactory;

    use super::{Cli, is_unread, one_line};

    /// Every verb, as its users write it, with its arguments: `--long`, or the name of a positional one.
    fn verbs(command: &clap::Command, name: &str, all: &mut BTreeMap<String, BTreeSet<String>>) {
        let below: Vec<_> = command
            .get_subcommands()
            .filter(|c| !c.is_hide_set())
            .collect();
        for verb in &below {
            let name = format!("{name} {}", verb.get_name());
            verbs(verb, name.trim_start(), all);
        }
        if below.is_empty() {
            let arguments = command.get_arguments().filter(|a| !a.is_hide_set());
            let argument = |a: &clap::Arg| match a.get_long() {
                Some(long) => format!("--{long}"),
                None => a
                    .get_value_names()
                    .map_or_else(String::new, |n| n[0].to_string()),
            };
            let own = arguments.map(argument).filter(|a| a != "--help").collect();
            all.insert(name.to_owned(), own);
        }
    }

    /// docs/commands.md has every verb with all of its arguments, and no argument that is not there.
    #[test]
    fn the_page_of_commands_is_complete() {
        let page = include_str!("../../docs/commands.md");
        let mut sections: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        let mut section = "";
        for line in page.lines() {
            if let Some(name) = line.strip_prefix("## ") {
                section = name;
            } else if let Some(first) = line.strip_prefix("| ").and_then(|l| l.split(" | ").next())
            {
                let names = first.split('`').skip(1).step_by(2).map(str::to_owned);
                sections.entry(section).or_default().extend(names);
            }
        }
        let mut all = BTreeMap::new();
        verbs(&Cli::command(), "", &mut all);
        assert!(all.len() > 15, "{all:?}");
        for (verb, arguments) in &all {
            let section = sections.get(verb.as_str());
            let section =
                section.unwrap_or_else(|| panic!("docs/commands.md has no section {verb}"));
            assert_eq!(arguments, section, "docs/commands.md, section {verb}");
        }
    }

    #[test]
    fn a_panic_is_more_than_a_closed_pipe() {
        let of = |text: &str| is_unread(&text.to_owned());
        assert!(of("failed printing to stdout: Broken pipe (os error 32)"));
        assert!(!of(
            "failed printing to stdout: No space left on device (os error 28)"
        ));
    }

    #[test]
    fn a_cause_is_named_once() {
        let cause = std::io::Error::other("disk full");
        let error = anyhow!(cause).context("a: cannot be written: disk full");
        assert_eq!(one_line(&error), "a: cannot be written: disk full");
        assert_eq!(
            one_line(&error.context("pack")),
            "pack: a: cannot be written: disk full"
        );
    }
}
