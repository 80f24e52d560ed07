//! Chooses the CRIU to use: that of the configuration, else the package cryopod-criu's, else the host's on PATH.
//!
//! runc and libcriu search `criu` on PATH, and crun has the dynamic linker search libcriu. So the choice is a matter of
//! this process's environment, which they inherit. The host's own CRIU stays as it is.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::config::Config;

/// Where the package cryopod-criu has its CRIU.
pub const PACKAGED: &str = "/usr/lib/cryopod/criu/criu";
/// The directory of libraries beside that of the programs, where all of cryopod is below one directory of its own.
const BESIDE: &str = "../lib/cryopod";
/// The directory beside CRIU that has its libcriu, which crun loads.
const LIBCRIU: &str = "libcriu";

/// Returns the CRIU that goes before the host's; `None`: the host's.
pub fn preferred(config: &Config) -> Option<PathBuf> {
    match &config.criu.program {
        Some(program) => program.is_absolute().then(|| program.clone()),
        None => packaged(),
    }
}

/// Returns the CRIU that came with cryopod: with this program, else that of the package.
pub fn packaged() -> Option<PathBuf> {
    let beside = beside().map(|directory| directory.join("criu/criu"));
    let places = beside.into_iter().chain([PathBuf::from(PACKAGED)]);
    places.into_iter().find(|p| p.is_file())
}

/// Returns the directory with the libraries that came with this program.
pub fn beside() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    own.parent()?.join(BESIDE).canonicalize().ok()
}

/// Returns the libcriu that belongs to the chosen CRIU.
pub fn libcriu(config: &Config) -> Option<PathBuf> {
    let library = preferred(config)?
        .with_file_name(LIBCRIU)
        .join("libcriu.so.2");
    library.is_file().then_some(library)
}

/// Puts the chosen CRIU before the host's, for this process and those that it starts.
pub fn prefer_over_host(config: &Config) {
    let directory = |path: PathBuf| path.parent().map(Path::to_owned);
    for (variable, first) in [
        ("PATH", preferred(config).and_then(directory)),
        ("LD_LIBRARY_PATH", libcriu(config).and_then(directory)),
    ] {
        if let Some(first) = first {
            let all = before(&first, std::env::var_os(variable));
            // SAFETY: this process has no other threads yet; it prepares its operation.
            unsafe { std::env::set_var(variable, all) };
        }
    }
}

/// A search path that begins with a directory.
fn before(first: &Path, rest: Option<OsString>) -> OsString {
    let mut all = first.as_os_str().to_owned();
    if let Some(rest) = rest.filter(|r| !r.is_empty()) {
        all.push(":");
        all.push(rest);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let criu = dir.path().join("criu");
        let mut config = Config::default();
        config.criu.program = Some(criu.clone());
        assert_eq!(preferred(&config), Some(criu));
        assert_eq!(libcriu(&config), None);
        std::fs::create_dir(dir.path().join("libcriu")).unwrap();
        let library = dir.path().join("libcriu/libcriu.so.2");
        std::fs::write(&library, "").unwrap();
        assert_eq!(libcriu(&config), Some(library));
        config.criu.program = Some("criu".into());
        assert_eq!(preferred(&config), None, "that of PATH");
    }

    #[test]
    fn search_paths() {
        let first = Path::new("/c");
        assert_eq!(before(first, None), "/c");
        assert_eq!(before(first, Some("".into())), "/c");
        assert_eq!(
            before(first, Some("/usr/bin:/bin".into())),
            "/c:/usr/bin:/bin"
        );
    }
}
