//! Ends the CRIU of a container that is given up, and tells whether one has written all images.
//!
//! A killed runtime leaves its CRIU behind. Most exit by themselves at the next request that nobody answers. One case
//! hangs forever: something kills the restored processes while CRIU traces them. CRIU waits for the init of the PID
//! namespace (`out_kill` of `restore_root_task` in CRIU's cr-restore.c). The init exits only after CRIU has reaped
//! every thread that it traces (`zap_pid_ns_processes` in the kernel).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use cryopod_archive::format::names;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long a CRIU without its runtime may work on.
pub const ENDS: Duration = Duration::from_secs(600);
/// Time for CRIU to exit by itself.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time for the kernel to end killed processes, once they are killed.
const END: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);
/// The stock shim's link to CRIU's work directory, in the bundle.
const WORK: &str = "work";

/// Returns the directories where CRIU may work on a bundle's container. `named` is the one from the engine's options,
/// or empty.
pub fn directories(bundle: &Path, named: &str) -> Vec<PathBuf> {
    let named = (!named.is_empty()).then(|| PathBuf::from(named));
    let all = [bundle.to_owned(), bundle.join(WORK)].into_iter();
    all.chain(named)
        .filter_map(|f| fs::canonicalize(f).ok())
        .collect()
}

/// Waits for every CRIU that works in these directories, and kills those that remain after a second. Returns `true` if
/// there was any.
pub fn end(directories: &[PathBuf]) -> bool {
    let start = Instant::now();
    let mut killed: Option<Instant> = None;
    let mut any = false;
    loop {
        let pids = at_work(directories);
        if pids.is_empty() || killed.is_some_and(|at| at.elapsed() >= END) {
            return any;
        }
        any = true;
        if start.elapsed() >= PATIENCE {
            killed.get_or_insert_with(Instant::now);
            for pid in pids {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        thread::sleep(PAUSE);
    }
}

/// Returns true if a CRIU works in these directories.
pub fn works(directories: &[PathBuf]) -> bool {
    !at_work(directories).is_empty()
}

/// Finds processes with CRIU's name that have a file of these directories open: CRIU keeps its log open while it works.
/// Processes that CRIU forks have its name at first.
fn at_work(directories: &[PathBuf]) -> Vec<i32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid > 1 && is_criu(*pid) && has_open(*pid, directories))
        .collect()
}

fn is_criu(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.starts_with("criu"))
}

fn has_open(pid: i32, directories: &[PathBuf]) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd"));
    open.into_iter().flatten().flatten().any(|fd| {
        fs::read_link(fd.path()).is_ok_and(|file| directories.iter().any(|f| file.starts_with(f)))
    })
}

/// Where a checkpoint's images go, and what was there before.
#[derive(Debug)]
pub struct WrittenImages {
    pub path: PathBuf,
    earlier: Option<Inventory>,
}

/// A file of CRIU's, by inode and time: it writes this one last.
type Inventory = (u64, SystemTime);

impl WrittenImages {
    pub fn new(path: PathBuf) -> Self {
        let earlier = Self::inventory(&path);
        Self { path, earlier }
    }

    fn inventory(path: &Path) -> Option<Inventory> {
        let meta = path.join(names::CRIU_INVENTORY).metadata().ok()?;
        Some((meta.ino(), meta.modified().ok()?))
    }

    /// Whether all of them are written. With GPUs the metadata is the last.
    pub fn are_complete(&self) -> bool {
        let now = Self::inventory(&self.path);
        let has = |name: &str| self.path.join(name).exists();
        now.is_some()
            && now != self.earlier
            && (has(names::METADATA) || !(has(names::NVIDIA_IMAGE) || has(names::VRAM_INDEX)))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    #[test]
    fn only_the_one_that_works_on_this_container() {
        let dir = tempfile::tempdir().unwrap();
        let criu = dir.path().join("criu");
        fs::copy("/bin/sleep", &criu).unwrap();
        let (bundle, work) = (dir.path().join("bundle"), dir.path().join("w"));
        let other = dir.path().join("bundle2");
        for directory in [&bundle, &work, &other] {
            fs::create_dir(directory).unwrap();
        }
        std::os::unix::fs::symlink(&work, bundle.join(WORK)).unwrap();
        let start = |program: &Path, log: PathBuf| -> Child {
            Command::new(program)
                .arg("1000")
                .stdout(fs::File::create(log).unwrap())
                .spawn()
                .unwrap()
        };
        let named = directories(&bundle, other.to_str().unwrap());
        assert_eq!(named.len(), 3);
        let directories = directories(&bundle, "");
        assert!(!end(&directories));
        let mut ours = start(&criu, work.join("restore.log"));
        let mut elsewhere = start(&criu, other.join("restore.log"));
        let mut no_criu = start(Path::new("/bin/sleep"), work.join("x"));
        assert!(end(&directories));
        assert!(!ours.wait().unwrap().success());
        for lives in [&mut elsewhere, &mut no_criu] {
            assert_eq!(lives.try_wait().unwrap(), None);
            lives.kill().unwrap();
            lives.wait().unwrap();
        }
    }
}
