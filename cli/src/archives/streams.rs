//! Archives on standard input and output, so that `cryopod export -o - job | ssh host cryopod import -` works.
//!
//! An archive is whole before its first byte is sent, and read whole before an engine sees it: either end may fail, and
//! nothing half done remains.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::temp_dir::{Holds, LockedTempDir};

/// An output on standard output.
const STDOUT: &str = "-";
const STDOUT_OCI: &str = "oci-archive:-";

/// Returns the file name for an archive that goes to standard output; `None` if the output is a place of its own. The name
/// says which kind it is.
pub fn to_stdout(output: &str) -> anyhow::Result<Option<&'static str>> {
    let name = match output {
        STDOUT => "checkpoint.tar.zst",
        STDOUT_OCI => "checkpoint.oci.tar",
        _ => return Ok(None),
    };
    if io::stdout().is_terminal() {
        bail!(
            "--output {output}: an archive is not for a terminal; name a file, or pipe it into another command"
        );
    }
    Ok(Some(name))
}

/// Sends a file to standard output.
pub fn send(path: &Path) -> anyhow::Result<u64> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let mut out = io::stdout().lock();
    let sent = io::copy(&mut file, &mut out).and_then(|n| out.flush().map(|()| n));
    sent.context("standard output: cannot be written")
}

/// An archive that came from standard input, in a directory that is removed with it.
pub struct ReceivedArchive {
    _temp: LockedTempDir,
    pub path: PathBuf,
}

/// Reads an archive from standard input.
pub fn receive() -> anyhow::Result<ReceivedArchive> {
    if io::stdin().is_terminal() {
        bail!(
            "-: the archive is read from standard input, which is a terminal; name a file, or pipe an archive into the command"
        );
    }
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let path = temp.path().join("archive");
    let mut file = File::create_new(&path).with_context(|| path.display().to_string())?;
    let read = io::copy(&mut io::stdin().lock(), &mut file);
    let read = read.with_context(|| {
        format!(
            "{}: standard input cannot be written there; $TMPDIR names another place",
            path.display()
        )
    })?;
    if read == 0 {
        bail!("-: standard input is empty: the command before it sent no archive");
    }
    Ok(ReceivedArchive { _temp: temp, path })
}
