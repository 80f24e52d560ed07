//! Detects from outside, before anything is locked, what the driver cannot checkpoint.
//!
//! Pure functions over the host's files. A finding here is certain enough to refuse. Everything else is left to the
//! driver; if it refuses, the process stays locked and the plugin undoes that.
//!
//! Seen on driver 580.159.04 (H200): a plain CUDA process has one mapping of `/dev/nvidia-uvm`, of 2 MiB;
//! `cudaMallocManaged` adds larger ones, and the driver then refuses the checkpoint. [`crate::sharing`] detects memory
//! that processes share.

pub mod refusal;

use crate::gpus::nvidia;
use cryopod_host::files::Host;
use cryopod_host::processes::maps;
use cryopod_host::processes::stat::StatusFile;
use refusal::Refusal;
use std::collections::BTreeSet;

/// The first driver that can checkpoint through the API.
const FIRST_DRIVER: u32 = 570;

/// Examines the CUDA processes `pids` of one container. Empty: nothing was found.
pub fn preflight(host: &Host, pids: &[i32]) -> Vec<Refusal> {
    if pids.is_empty() {
        return Vec::new();
    }
    let branch = nvidia::driver_version(host)
        .as_deref()
        .and_then(nvidia::branch);
    let mut refusals: Vec<Refusal> = branch.into_iter().filter_map(too_old).collect();
    let instances = mig_minors(host);
    let processes: Vec<Process> = pids.iter().map(|pid| Process::read(host, *pid)).collect();
    for process in &processes {
        let findings = [
            process.stopped(),
            process.managed_memory(),
            process.mps(host),
            process.mig(&instances),
        ];
        for (what, remedy) in findings.into_iter().flatten() {
            refusals.push(Refusal::new(what, remedy).about(process.pid, &process.comm));
        }
    }
    refusals
}

fn too_old(branch: u32) -> Option<Refusal> {
    (branch < FIRST_DRIVER).then(|| {
        Refusal::new(
            format!("NVIDIA's driver {branch} cannot checkpoint processes"),
            format!("install driver {FIRST_DRIVER} or later"),
        )
    })
}

type Finding = Option<(String, String)>;

#[derive(Debug, Default)]
struct Process {
    pid: i32,
    comm: String,
    files: BTreeSet<String>,
    /// Managed memory (UVM), in bytes.
    managed: u64,
    environment: Vec<(String, String)>,
    /// Stopped by a signal.
    stopped: bool,
}

/// A mapping of `/dev/nvidia-uvm` larger than this is managed memory; the driver's own are not.
const MANAGED_BYTES: u64 = 2 << 20;

impl Process {
    fn read(host: &Host, pid: i32) -> Self {
        let mut managed = 0;
        let _ = maps::for_each(host, pid, |mapping| {
            if mapping.name == "/dev/nvidia-uvm" && mapping.bytes() > MANAGED_BYTES {
                managed = mapping.bytes().saturating_add(managed);
            }
        });
        let environment = host
            .text(format!("/proc/{pid}/environ"))
            .unwrap_or_default();
        Self {
            pid,
            comm: host.line(format!("/proc/{pid}/comm")).unwrap_or_default(),
            stopped: StatusFile::read(host, pid).number("State") == Some('T'),
            files: links(host, pid),
            managed,
            environment: environment
                .split('\0')
                .filter_map(|entry| entry.split_once('='))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        }
    }

    fn variable(&self, name: &str) -> Option<&str> {
        let found = self.environment.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The driver locks and copies in the process's own threads, and would wait for them until its time limit.
    fn stopped(&self) -> Finding {
        self.stopped.then(|| {
            (
                "it is stopped by a signal (SIGSTOP, SIGTSTP), and the driver needs its threads"
                    .to_owned(),
                format!("continue it for the checkpoint: kill -CONT {}", self.pid),
            )
        })
    }

    fn managed_memory(&self) -> Finding {
        (self.managed > 0).then(|| {
            (
                format!("it uses managed memory (UVM), {} MiB", self.managed >> 20),
                "the driver cannot checkpoint it: allocate with cudaMalloc instead of cudaMallocManaged (PyTorch and JAX do)".to_owned(),
            )
        })
    }

    fn mps(&self, host: &Host) -> Finding {
        let default = "/tmp/nvidia-mps";
        let directory = self.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap_or(default);
        let open = self
            .files
            .iter()
            .any(|path| path.starts_with(&format!("{directory}/")));
        // The container's own view; never opened, and a name cannot leave it by `..`.
        let inside = directory.starts_with('/') && !directory.split('/').any(|part| part == "..");
        let control = format!("/proc/{}/root{directory}/control", self.pid);
        let served = inside && host.path(control).symlink_metadata().is_ok();
        (open || served).then(|| {
            (
                format!("it is a client of NVIDIA MPS ({directory})"),
                "the driver cannot checkpoint MPS clients: run it without MPS".to_owned(),
            )
        })
    }

    fn mig(&self, instances: &BTreeSet<u32>) -> Finding {
        let open = self.files.iter().find(|path| {
            let number = path.strip_prefix("/dev/nvidia-caps/nvidia-cap");
            number
                .and_then(|n| n.parse().ok())
                .is_some_and(|n: u32| instances.contains(&n))
        });
        let named = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"]
            .into_iter()
            .find(|name| {
                self.variable(name)
                    .is_some_and(|value| value.split(',').any(|v| v.trim().starts_with("MIG-")))
            });
        let how = open.map(String::as_str).or(named)?;
        Some((
            format!("it runs on a MIG instance ({how})"),
            "the driver cannot checkpoint MIG instances: give it a whole GPU".to_owned(),
        ))
    }
}

fn links(host: &Host, pid: i32) -> BTreeSet<String> {
    let directory = format!("/proc/{pid}/fd");
    let target = |fd: &String| std::fs::read_link(host.path(format!("{directory}/{fd}"))).ok();
    let names = host.names(&directory);
    let targets = names.iter().filter_map(target);
    targets
        .filter_map(|path| path.into_os_string().into_string().ok())
        .collect()
}

/// The minors of `/dev/nvidia-caps/nvidia-capN` that stand for a GPU or compute instance.
fn mig_minors(host: &Host) -> BTreeSet<u32> {
    let mut minors = BTreeSet::new();
    let base = format!("{}/capabilities", nvidia::PROC);
    let numbered = |names: Vec<String>, prefix: &str| -> Vec<String> {
        let is_ours = |name: &String| {
            name.strip_prefix(prefix)
                .is_some_and(|n| n.parse::<u32>().is_ok())
        };
        names.into_iter().filter(is_ours).collect()
    };
    let mut take = |directory: &str| {
        let text = host.text(format!("{directory}/access")).unwrap_or_default();
        let minor = text
            .lines()
            .find_map(|line| line.strip_prefix("DeviceFileMinor:"));
        minors.extend(minor.and_then(|m| m.trim().parse::<u32>().ok()));
    };
    for gpu in numbered(host.names(&base), "gpu") {
        let mig = format!("{base}/{gpu}/mig");
        for instance in numbered(host.names(&mig), "gi") {
            let directory = format!("{mig}/{instance}");
            take(&directory);
            for compute in numbered(host.names(&directory), "ci") {
                take(&format!("{directory}/{compute}"));
            }
        }
    }
    minors
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use std::fs;

    use std::path::Path;

    /// Mappings of a plain CUDA process, as seen on a real one.
    const PLAIN: &str = "204a00000-204c00000 rw-s 204a00000 00:06 7 /dev/nvidia-uvm\n7f0000000000-7f0000001000 r--p 00000000 08:01 9 /usr/lib/libcuda.so.580.159.04\n7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n";

    fn machine(driver: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let text =
            format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Release Build\n");
        dir.put("proc/driver/nvidia/version", text);
        dir
    }

    fn process(root: &Path, pid: i32, maps: &str, environment: &str) {
        let proc = root.join(format!("proc/{pid}"));
        proc.dir("root/tmp");
        proc.put("comm", "python3\n");
        proc.put("maps", format!("{PLAIN}{maps}"));
        proc.put("environ", environment);
        proc.link("fd/3", "/dev/nvidia0");
    }

    fn told(root: &Path, pids: &[i32]) -> Vec<String> {
        let refusals = preflight(&Host::at(root), pids);
        refusals
            .into_iter()
            .map(|r| format!("{} {}", r.process.map_or(0, |p| p.0), r.what))
            .collect()
    }

    #[test]
    fn a_stopped_process_is_said_at_once() {
        let machine = machine("580.159.04");
        for (pid, state) in [
            (10, "S (sleeping)"),
            (11, "T (stopped)"),
            (12, "t (tracing stop)"),
        ] {
            process(machine.path(), pid, "", "");
            let status = machine.path().join(format!("proc/{pid}/status"));
            fs::write(status, format!("Name:\tpython3\nState:\t{state}\n")).unwrap();
        }
        let told = told(machine.path(), &[10, 11, 12]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(
            told[0].starts_with("11 it is stopped by a signal"),
            "{told:?}"
        );
    }

    #[test]
    fn a_plain_process_passes() {
        let dir = machine("580.159.04");
        process(dir.path(), 7, "", "PATH=/bin\0CUDA_VISIBLE_DEVICES=0\0");
        assert_eq!(told(dir.path(), &[7]), [""; 0]);
        assert_eq!(told(dir.path(), &[8]), [""; 0], "a process that is gone");
        assert_eq!(told(machine("550.54.15").path(), &[]), [""; 0]);
    }

    #[test]
    fn an_old_driver_is_told_once() {
        let dir = machine("550.54.15");
        process(dir.path(), 7, "", "");
        assert_eq!(
            told(dir.path(), &[7]),
            ["0 NVIDIA's driver 550 cannot checkpoint processes"]
        );
    }

    #[test]
    fn managed_memory() {
        let dir = machine("580.159.04");
        let maps = "7f31ba000000-7f31be000000 rw-s 7f31ba000000 00:06 7 /dev/nvidia-uvm\n";
        process(dir.path(), 7, maps, "");
        assert_eq!(
            told(dir.path(), &[7]),
            ["7 it uses managed memory (UVM), 64 MiB"]
        );
    }

    #[test]
    fn mps_when_its_pipes_are_there() {
        let dir = machine("580.159.04");
        process(dir.path(), 7, "", "CUDA_MPS_PIPE_DIRECTORY=/mps\0");
        assert_eq!(
            told(dir.path(), &[7]),
            [""; 0],
            "named, but nobody serves it"
        );
        dir.put("proc/7/root/mps/control", "");
        assert_eq!(
            told(dir.path(), &[7]),
            ["7 it is a client of NVIDIA MPS (/mps)"]
        );
        process(dir.path(), 8, "", "");
        dir.link("proc/8/fd/4", "/tmp/nvidia-mps/log");
        assert_eq!(
            told(dir.path(), &[8]),
            ["8 it is a client of NVIDIA MPS (/tmp/nvidia-mps)"]
        );
        process(dir.path(), 9, "", "CUDA_MPS_PIPE_DIRECTORY=/../..\0");
        assert_eq!(told(dir.path(), &[9]), [""; 0]);
    }

    #[test]
    fn mig_by_its_instance() {
        let dir = machine("580.159.04");
        let mig = dir
            .path()
            .join("proc/driver/nvidia/capabilities/gpu0/mig/gi1");
        mig.put("access", "DeviceFileMinor: 12\nDeviceFileMode: 292\n");
        mig.put("ci0/access", "DeviceFileMinor: 13\n");
        process(dir.path(), 7, "", "");
        dir.link("proc/7/fd/4", "/dev/nvidia-caps/nvidia-cap2");
        assert_eq!(told(dir.path(), &[7]), [""; 0], "cap2 is for monitoring");
        dir.link("proc/7/fd/5", "/dev/nvidia-caps/nvidia-cap13");
        let what = "7 it runs on a MIG instance (/dev/nvidia-caps/nvidia-cap13)";
        assert_eq!(told(dir.path(), &[7]), [what]);
        process(dir.path(), 8, "", "NVIDIA_VISIBLE_DEVICES=MIG-1234\0");
        assert_eq!(
            told(dir.path(), &[8]),
            ["8 it runs on a MIG instance (NVIDIA_VISIBLE_DEVICES)"]
        );
    }
}
