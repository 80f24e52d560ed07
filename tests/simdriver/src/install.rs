//! Puts the simulated driver where a container or a test can use it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

const BUILT: &str = "libcuda_sim.so";
const NCCL: &str = "libnccl_sim.so";

/// The built `libcuda`, sought around the running program: `target/debug`, or `target/debug/deps`
/// for a test. Cargo may leave an old copy in one of the two, so the newest is taken.
pub fn built_library() -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let mut found: Vec<(SystemTime, PathBuf)> = Vec::new();
    for dir in exe.ancestors().skip(1).take(2) {
        for candidate in [
            dir.join(BUILT),
            dir.join("deps").join(BUILT),
            dir.join("libcuda.so.1"),
        ] {
            if let Ok(changed) = fs::metadata(&candidate).and_then(|m| m.modified()) {
                found.push((changed, candidate));
            }
        }
    }
    match found.into_iter().max() {
        Some((_, path)) => Ok(path),
        None => bail!(
            "{BUILT} is not next to {}: build the package first",
            exe.display()
        ),
    }
}

/// Copies the library as `libcuda.so.1` and `libnvidia-ml.so.1`, and the simulated NCCL if it is built; writes `cusim.conf` beside it, and copies the programs
/// that are found. Returns what was written.
pub fn install(directory: &Path, socket: &Path) -> Result<Vec<PathBuf>> {
    let library = built_library()?;
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let mut written = Vec::new();
    let mut put = |from: &Path, name: &str| -> Result<()> {
        let to = directory.join(name);
        // A file in use is replaced, not written into.
        let part = directory.join(format!(".{name}.part"));
        fs::copy(from, &part).with_context(|| format!("cannot copy {}", from.display()))?;
        fs::rename(&part, &to)?;
        written.push(to);
        Ok(())
    };
    put(&library, "libcuda.so.1")?;
    put(&library, "libnvidia-ml.so.1")?;
    let from = library.parent().unwrap_or(Path::new("."));
    let nccl = [from.join(NCCL), from.join("..").join(NCCL)];
    if let Some(nccl) = nccl.iter().find(|path| path.is_file()) {
        put(nccl, "libnccl.so.2")?;
    }
    for name in [
        "cusim-client",
        "cusim-random",
        "cusim-nccl",
        "cusim-server",
        "cusim-ctl",
        "cusim-step",
        "cusim-probe",
    ] {
        let program = [from.join(name), from.join("..").join(name)];
        if let Some(p) = program.iter().find(|p| p.is_file()) {
            put(p, name)?;
        }
    }
    let conf = directory.join("cusim.conf");
    fs::write(&conf, format!("socket={}\n", socket.display()))?;
    written.push(conf);
    Ok(written)
}
