//! `containerd-shim-cryopod-v2`: containerd's runtime `io.containerd.cryopod.v2`. See the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    cryopod_shim::main(std::env::args_os().skip(1).collect())
}
