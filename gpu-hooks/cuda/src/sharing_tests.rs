use super::*;
use cryopod_test_files::TestFiles;

const CONTEXT: &str = "204a00000-204c00000 rw-s 204a00000 00:06 7                /dev/nvidia-uvm\n";
const SHM: [&str; 3] = [
    "NCCL_P2P_DISABLE=1",
    "NCCL_CUMEM_HOST_ENABLE=0",
    "NCCL_NVLS_ENABLE=0",
];

struct Machine(tempfile::TempDir);

impl Machine {
    fn new(driver: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let text = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Release\n");
        machine.write("driver/nvidia/version", &text);
        machine
    }

    fn write(&self, name: &str, text: &str) {
        self.0.path().join("proc").put(name, text);
    }

    /// Process `pid`, 100 less in its container, with these sockets, maps and variables, in the network namespace 1.
    fn process(&self, pid: i32, sockets: &[u64], maps: &str, environment: &[&str]) {
        let status = format!("Name:\tpython3\nNSpid:\t{pid}\t{}\n", pid - 100);
        self.write(&format!("{pid}/status"), &status);
        self.write(&format!("{pid}/maps"), maps);
        self.write(&format!("{pid}/environ"), &environment.join("\0"));
        let proc = self.0.path().join("proc").join(pid.to_string());
        proc.dir("fd");
        proc.link("ns/net", "net:[1]");
        for (n, inode) in sockets.iter().enumerate() {
            proc.link(format!("fd/{n}"), format!("socket:[{inode}]"));
        }
    }

    fn sockets(&self, of: &[i32], ranks: &[(u64, &str)]) {
        let mut text = "Num       RefCount Protocol Flags    Type St Inode Path\n".to_owned();
        text += "0000000000000000: 00000002 00000000 00010000 0001 01 11 /run/x y\n";
        text += "0000000000000000: 00000003 00000000 00000000 0001 03 12\n";
        for (inode, rank) in ranks {
            // Bound with the whole structure: the kernel shows its zeros.
            text += &format!(
                "0000000000000000: 00000002 00000000 00000000 0002 01 {inode} @tmp/nccl-socket-{rank}-9d0c1f@@@@\n"
            );
        }
        for pid in of {
            self.write(&format!("{pid}/net/unix"), &text);
        }
    }

    fn found(&self, pids: &[i32]) -> Vec<Refusal> {
        let host = Host::at(self.0.path());
        preflight(&host, &Scan::of(&host, pids), pids)
    }

    fn told(&self, pids: &[i32]) -> Vec<String> {
        let found = self.found(pids).into_iter();
        found
            .map(|r| format!("{} {}", r.process.unwrap().0, r.what))
            .collect()
    }
}

fn pair(environment: [&[&str]; 2]) -> Machine {
    let machine = Machine::new("580.159.04");
    machine.process(107, &[31, 32], CONTEXT, environment[0]);
    machine.process(108, &[41], CONTEXT, environment[1]);
    machine.sockets(&[107, 108], &[(31, "0"), (41, "1")]);
    machine
}

#[test]
fn nccl_is_refused_unless_every_rank_is_safe() {
    let socket = ["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", SHM[2]];
    for environment in [[&SHM[..], &SHM], [&socket, &socket], [&SHM, &socket]] {
        assert_eq!(pair(environment).told(&[107, 108]), [""; 0]);
    }
    let plugin = [SHM[0], SHM[1], SHM[2], "NCCL_ENV_PLUGIN=x"];
    let overridden = ["NCCL_P2P_DISABLE=0", SHM[0], SHM[1], SHM[2]];
    for (environment, way) in [
        (&[][..], "P2P/CUMEM"),
        (&["NCCL_CUMEM_ENABLE=0"], "P2P/IPC"),
        (&["NCCL_P2P_DISABLE=1"], "SHM in cuMem host memory"),
        (&SHM[..2], "NVLS"),
        (&SHM[1..], "P2P/CUMEM"),
        (&overridden, "P2P/CUMEM"),
        (&plugin, "what NCCL_ENV_PLUGIN"),
    ] {
        for environments in [[environment, environment], [&SHM, environment]] {
            let told = pair(environments).told(&[107, 108]);
            let start = "107 it shares GPU memory through NCCL with process 108 (python3); the transport, as far as their environment tells, is ";
            assert_eq!(told.len(), 1, "{told:?}");
            assert!(told[0].starts_with(&format!("{start}{way}")), "{told:?}");
        }
    }
    let remedy = &pair([&[], &[]]).found(&[107, 108])[0].remedy;
    for word in [
        "destroy_process_group",
        "NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0 NCCL_NVLS_ENABLE=0",
        "dev.cryopod.env.avoid=nccl",
        "dev.cryopod.gpu.sharing=allow",
    ] {
        assert!(remedy.contains(word), "{remedy}");
    }
}

#[test]
fn the_driver_does_not_change_that() {
    let machine = pair([&[], &[]]);
    machine.write(
        "driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  615.10  Release\n",
    );
    assert_eq!(machine.told(&[107, 108]).len(), 1);
}

#[test]
fn what_is_no_reason() {
    let machine = pair([&[], &[]]);
    assert_eq!(machine.told(&[107]), [""; 0], "one process uses CUDA");
    assert_eq!(machine.told(&[107, 999]), [""; 0], "the other is gone");
    // Destroyed: other sockets are left.
    machine.sockets(&[107, 108], &[]);
    assert_eq!(machine.told(&[107, 108]), [""; 0]);
    // Another container's, in the same network namespace.
    machine.sockets(&[107, 108], &[(31, "0"), (77, "1")]);
    assert_eq!(machine.told(&[107, 108]), [""; 0]);
    // Several jobs of one rank each.
    machine.sockets(&[107, 108], &[(31, "0"), (41, "0")]);
    assert_eq!(machine.told(&[107, 108]), [""; 0]);
}

#[test]
fn forked_children_are_no_ranks() {
    let machine = Machine::new("580.159.04");
    let shared = "7f00-7f10 rw-s 0 00:1a 44      /dev/shm/nccl-Ab3 (deleted)\n";
    let exported = "7f00-7f10 rw-s 0 00:1a 44      /dev/shm/cuda.shm.0.7.1\n";
    machine.process(107, &[31, 32], &format!("{CONTEXT}{shared}{exported}"), &[]);
    machine.process(108, &[31, 32], &format!("{shared}{exported}"), &[]);
    machine.sockets(&[107, 108], &[(31, "0"), (32, "1")]);
    assert_eq!(machine.told(&[107, 108]), [""; 0]);
}

#[test]
fn several_communicators_of_a_process() {
    let machine = pair([&[], &[]]);
    machine.process(109, &[51], CONTEXT, &[]);
    machine.sockets(
        &[107, 108, 109],
        &[(31, "0"), (32, "1"), (41, "0"), (51, "0")],
    );
    let told = machine.told(&[107, 108, 109]);
    let with =
        "107 it shares GPU memory through NCCL with process 108 (python3), process 109 (python3);";
    assert!(told.len() == 1 && told[0].starts_with(with), "{told:?}");
}

#[test]
fn many_ranks_in_one_message() {
    let machine = Machine::new("580.159.04");
    let pids: Vec<i32> = (107..123).collect();
    let mut ranks = Vec::new();
    let names: Vec<String> = (0..16).map(|n| n.to_string()).collect();
    for (n, pid) in (0..).zip(&pids) {
        machine.process(*pid, &[n + 50], CONTEXT, &[]);
        ranks.push((n + 50, names[usize::try_from(n).unwrap()].as_str()));
    }
    machine.sockets(&pids, &ranks);
    let told = machine.told(&pids);
    assert!(
        told.len() == 1 && told[0].contains("115 (python3), 7 more;"),
        "{told:?}"
    );
}

#[test]
fn an_old_nccl_by_its_files() {
    let shared = "7f00-7f10 rw-s 0 00:1a 44      /dev/shm/nccl-Ab3 (deleted)\n";
    for (environment, refused) in [(&[][..], 1), (&SHM, 0)] {
        let machine = Machine::new("580.159.04");
        machine.process(107, &[], &format!("{CONTEXT}{shared}"), environment);
        machine.process(108, &[], &format!("{CONTEXT}{shared}"), environment);
        machine.process(109, &[], CONTEXT, environment);
        assert_eq!(machine.told(&[107, 108, 109]).len(), refused);
        assert_eq!(machine.told(&[107, 109]), [""; 0]);
    }
}

#[test]
fn importers_by_cuda_ipc() {
    let map = "7f00-7f10 rw-s 0 00:1a 44      /dev/shm/cuda.shm.0.4c6.1\n";
    let importer = "it uses GPU memory of process 1322 (python3) by CUDA IPC: the driver would checkpoint it and fail to restore it";
    for (driver, refused) in [("580.159.04", true), ("610.1", false)] {
        let machine = Machine::new(driver);
        machine.process(1322, &[], &format!("{CONTEXT}{map}"), &[]);
        assert_eq!(machine.told(&[1322]), [""; 0], "the exporter alone");
        machine.process(1323, &[], &format!("{CONTEXT}{map}"), &[]);
        let want = [format!("1323 {importer}")];
        assert_eq!(machine.told(&[1322, 1323]), want[..usize::from(refused)]);
        let outside = machine.told(&[1323]);
        assert_eq!(
            outside
                .iter()
                .any(|t| t.contains("outside of the container")),
            refused
        );
    }
    for path in [
        "/dev/shm/cuda.shm.0",
        "/dev/shm/cuda.shm.0.xyz.1",
        "/tmp/cuda.shm.0.4c6.1",
    ] {
        assert_eq!(exporter_of(path), None, "{path}");
    }
}

#[test]
fn a_list_that_is_too_long_is_said() {
    let machine = pair([&[], &[]]);
    machine.sockets(&[107, 108], &[]);
    let list = machine.0.path().join("proc/107/net/unix");
    let file = File::options().write(true).open(&list).unwrap();
    file.set_len(MAX_SOCKETS + 1).unwrap();
    let told = machine.told(&[107, 108]);
    assert!(
        told.len() == 1 && told[0].contains("more unix sockets than are looked at"),
        "{told:?}"
    );
}

#[test]
fn policies() {
    let spec =
        |value: &str| Spec::from_json(serde_json::json!({"annotations": {ANNOTATION: value}}));
    assert_eq!(
        Policy::of(&spec("allow"), Policy::Refuse),
        Ok(Policy::Allow)
    );
    assert_eq!(
        Policy::of(&spec("refuse"), Policy::Allow),
        Ok(Policy::Refuse)
    );
    assert_eq!(
        Policy::of(&spec("yes"), Policy::Refuse),
        Err("annotation dev.cryopod.gpu.sharing: \"yes\" is not one of refuse, allow".into())
    );
    let none = Spec::from_json(serde_json::Value::Null);
    assert_eq!(Policy::of(&none, Policy::Allow), Ok(Policy::Allow));
    let found = pair([&[], &[]]).found(&[107, 108]);
    assert_eq!(Policy::Allow.settle(found.clone()), []);
    assert_eq!(Policy::Refuse.settle(found.clone()), found);
}

#[test]
fn lines_of_the_list() {
    for (line, want) in [
        ("0: 2 0 0 2 01 31 @tmp/nccl-socket-12-ab", Some((31, 12))),
        ("0: 2 0 0 2 01 31 /tmp/nccl-socket-12-ab", None),
        ("0: 2 0 0 2 01 31 @tmp/nccl-socket-x-ab", None),
        ("0: 2 0 0 2 01 31", None),
        ("", None),
    ] {
        assert_eq!(rank_of(line), want, "{line}");
    }
}
