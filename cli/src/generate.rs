//! `cryopod generate`: writes the man pages and the shells' completions from the definition of the command line. Packages
//! are made with it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

#[derive(clap::Args)]
pub struct Args {
    /// An existing directory for the files.
    directory: PathBuf,
}

/// Runs `cryopod generate`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let directory = &args.directory;
    let mut command = crate::Cli::command();
    let failed = || format!("{}: cannot be written to", directory.display());
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "cryopod", directory)
            .with_context(failed)?;
    }
    // A page for the command, for each subcommand, and for theirs: cryopod-store-ls.1.
    let command = crate::Cli::command()
        .disable_help_subcommand(true)
        .mut_subcommands(|command| command.disable_help_subcommand(true));
    clap_mangen::generate_to(command, directory).with_context(failed)?;
    Ok(ExitCode::SUCCESS)
}
