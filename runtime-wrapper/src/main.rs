//! Runs `cryopod-runtime`, the OCI runtime: hands everything on to runc or crun. See the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    cryopod_operations::main(std::env::args_os().collect())
}
