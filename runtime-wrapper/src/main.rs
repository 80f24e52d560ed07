//! `cryopod-runtime`: names itself as the OCI runtime and hands everything on to runc or crun. See the library.

use std::process::ExitCode;

// Linked for its entry point, which the static build starts at.
use cryopod_fastpath as _;

fn main() -> ExitCode {
    cryopod_runtime::main(std::env::args_os().collect())
}
