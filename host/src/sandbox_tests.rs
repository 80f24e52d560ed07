//! What a decoder that a stranger has taken over can do. Each call is made in a real child.

use super::*;
use std::fs;

const LONG: Duration = Duration::from_secs(60);

/// A system call's name, number and arguments.
type Call = (&'static str, libc::c_long, [libc::c_long; 6]);

/// The errors of system calls that a child makes, by name; 0: the kernel did it.
fn errors(calls: &[Call]) -> Vec<(String, i32)> {
    let text = Sandbox::default().run(LONG, || {
        let error = |(name, number, [a, b, c, d, e, f]): &Call| {
            // SAFETY: in a child that ends thereafter; what is a pointer is null or a string with an end.
            let done = unsafe { libc::syscall(*number, *a, *b, *c, *d, *e, *f) };
            let error = io::Error::last_os_error().raw_os_error();
            let error = error.filter(|_| done == -1).unwrap_or_default();
            format!("{name} {error}\n")
        };
        Ok::<_, String>(calls.iter().map(error).collect::<String>().into_bytes())
    });
    let text = String::from_utf8(text.unwrap()).unwrap();
    let pair = |line: &str| {
        let (name, error) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), error.parse().unwrap())
    };
    text.lines().map(pair).collect()
}

fn call(name: &'static str, number: libc::c_long, arguments: &[libc::c_long]) -> Call {
    let mut six = [0; 6];
    six[..arguments.len()].copy_from_slice(arguments);
    (name, number, six)
}

#[test]
fn the_kernel_refuses_what_no_decoder_does() {
    let program = c"/bin/true".as_ptr() as libc::c_long;
    let own = libc::c_long::from(std::process::id());
    let (at, inet, unix, stream) = (
        libc::c_long::from(libc::AT_FDCWD),
        libc::c_long::from(libc::AF_INET),
        libc::c_long::from(libc::AF_UNIX),
        libc::c_long::from(libc::SOCK_STREAM),
    );
    let calls = [
        call("execve", libc::SYS_execve, &[program]),
        call("execveat", libc::SYS_execveat, &[at, program]),
        call("socket", libc::SYS_socket, &[inet, stream]),
        call("unix socket", libc::SYS_socket, &[unix, stream]),
        call(
            "ptrace",
            libc::SYS_ptrace,
            &[libc::PTRACE_ATTACH.into(), own],
        ),
        call("fork", libc::SYS_clone, &[libc::SIGCHLD.into()]),
        call(
            "namespace",
            libc::SYS_unshare,
            &[libc::CLONE_NEWUSER.into()],
        ),
        call("mount", libc::SYS_mount, &[]),
        call("kill", libc::SYS_kill, &[own]),
        call("tgkill", libc::SYS_tgkill, &[own, own]),
        call("pidfd_open", libc::SYS_pidfd_open, &[own]),
        call("process_vm_writev", libc::SYS_process_vm_writev, &[own]),
        call("setuid", libc::SYS_setuid, &[]),
        call("bpf", libc::SYS_bpf, &[]),
        call("io_uring", libc::SYS_io_uring_setup, &[1]),
        call("open_by_handle_at", libc::SYS_open_by_handle_at, &[]),
        call(
            "terminal input",
            libc::SYS_ioctl,
            &[0, libc::TIOCSTI as libc::c_long],
        ),
    ];
    let all = errors(&calls);
    assert_eq!(all.len(), calls.len());
    for (name, error) in all {
        assert_eq!(error, libc::EPERM, "{name}");
    }
    let clone3 = errors(&[call("clone3", libc::SYS_clone3, &[])]);
    assert_eq!(clone3, [("clone3".to_owned(), libc::ENOSYS)]);
}

#[test]
fn files_are_those_that_it_was_given() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["read", "write", "other"] {
        fs::create_dir(path(name)).unwrap();
        fs::write(path(name).join("file"), name).unwrap();
    }
    std::os::unix::fs::symlink(path("other"), path("write/link")).unwrap();
    let sandbox = Sandbox {
        read: vec![path("read"), path("none")],
        write: vec![path("write")],
    };
    let kind = |done: io::Result<()>| done.err().map_or("done".into(), |e| e.kind().to_string());
    let said = sandbox.run(LONG, || {
        let said = [
            kind(fs::read(path("read/file")).map(drop)),
            kind(fs::write(path("read/file"), "")),
            kind(fs::write(path("read/new"), "")),
            kind(fs::write(path("write/new"), "")),
            kind(fs::remove_file(path("write/file"))),
            kind(fs::read(path("other/file")).map(drop)),
            kind(fs::read(path("write/link/file")).map(drop)),
            kind(fs::read("/etc/shadow").map(drop)),
            kind(fs::read("/proc/self/mem").map(drop)),
            kind(fs::write("/proc/self/comm", "x")),
            kind(fs::rename(path("write/new"), path("other/new"))),
        ];
        Ok::<_, String>(said.join(",").into_bytes())
    });
    let said = String::from_utf8(said.unwrap()).unwrap();
    let no = "permission denied";
    let want = ["done", no, no, "done", "done", no, no, no, no, no];
    let (files, rename) = said.rsplit_once(',').unwrap();
    assert!(has_landlock(), "this kernel cannot bound files");
    assert_eq!(files, want.join(","));
    assert_ne!(rename, "done");
    assert!(path("other/file").exists() && path("write/new").exists());
}

#[test]
fn it_has_no_capabilities_and_no_descriptors_of_others() {
    let open = fs::File::open("/dev/null").unwrap();
    // SAFETY: a number; the descriptor is closed with the process.
    let inherited = unsafe { libc::dup(open.as_raw_fd()) };
    let sandbox = Sandbox {
        read: vec!["/proc".into()],
        ..Sandbox::default()
    };
    let said = sandbox.run(LONG, || {
        let status = fs::read_to_string("/proc/thread-self/status").map_err(|e| e.to_string())?;
        // SAFETY: numbers.
        let closed = unsafe { libc::fcntl(inherited, libc::F_GETFD) } == -1;
        Ok::<_, String>(format!("{status}closed {closed}\n").into_bytes())
    });
    let said = String::from_utf8(said.unwrap()).unwrap();
    let value = |key: &str| {
        said.lines()
            .find_map(|l| l.strip_prefix(key))
            .map(str::trim)
    };
    for key in ["CapEff:", "CapPrm:", "CapInh:", "CapBnd:", "CapAmb:"] {
        assert_eq!(value(key), Some("0000000000000000"), "{key}");
    }
    assert_eq!(
        (value("NoNewPrivs:"), value("Seccomp:")),
        (Some("1"), Some("2"))
    );
    assert_eq!(value("closed"), Some("true"));
}

/// Root reads and writes what belongs to the user for whom it unpacks.
#[test]
fn another_users_files_are_within_reach_of_root() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    for path in [&from, &to] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("file"), "theirs").unwrap();
        for path in [path.join("file"), path.clone()] {
            std::os::unix::fs::chown(&path, Some(1000), Some(1000)).unwrap();
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
                .unwrap();
        }
    }
    let sandbox = Sandbox {
        read: vec![from.clone()],
        write: vec![to.clone()],
    };
    let done = sandbox.run(LONG, || {
        let bytes = fs::read(from.join("file")).map_err(|e| e.to_string())?;
        fs::write(to.join("new"), &bytes).map_err(|e| e.to_string())?;
        Ok::<_, String>(bytes)
    });
    assert_eq!(done.unwrap(), b"theirs");
    // runc's own directory for images.
    let own = dir.path().join("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("file"), "own").unwrap();
    fs::set_permissions(&own, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let sandbox = Sandbox {
        read: vec![own.clone()],
        write: Vec::new(),
    };
    let done = sandbox.run(LONG, || {
        fs::read(own.join("file")).map_err(|e| e.to_string())
    });
    assert_eq!(done.unwrap(), b"own");
}

#[test]
fn threads_results_and_errors() {
    let sandbox = Sandbox::default();
    let large = sandbox.run(LONG, || {
        let parts = std::thread::scope(|scope| {
            let parts = [1u8, 2, 3].map(|n| scope.spawn(move || vec![n; 1 << 20]));
            parts.map(|p| p.join().unwrap_or_default())
        });
        Ok::<_, String>(parts.concat())
    });
    assert_eq!(large.unwrap().len(), 3 << 20);
    let failed = sandbox
        .run(LONG, || Err::<Vec<u8>, _>("a.img: no image"))
        .unwrap_err();
    assert_eq!(failed.to_string(), "a.img: no image");
    let died = sandbox
        .run::<String>(LONG, || std::process::abort())
        .unwrap_err();
    assert!(died.to_string().contains("SIGABRT"), "{died}");
    let panicked = sandbox
        .run::<String>(LONG, || panic!("in a decoder"))
        .unwrap_err();
    assert!(
        panicked.to_string().contains("without an answer"),
        "{panicked}"
    );
}

#[test]
fn what_hangs_is_killed() {
    let work = || loop {
        std::thread::sleep(Duration::from_secs(1));
    };
    let worker = Sandbox::default().start::<String>(work).unwrap();
    let pid = worker.pid.unwrap();
    let hangs = worker.finish(Duration::from_millis(50)).unwrap_err();
    assert!(hangs.to_string().contains("took longer"), "{hangs}");
    assert!(kill(pid, None).is_err());
}

/// One that says all, closes its pipe and goes on, as a decoder may that a stranger has taken over.
#[test]
fn what_has_said_all_ends() {
    let silent = Sandbox::default().run::<String>(LONG, || {
        for fd in 3..1024 {
            // SAFETY: a number; the child uses none of them any more.
            unsafe { libc::close(fd) };
        }
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let silent = silent.unwrap_err().to_string();
    assert!(silent.contains("was killed by SIGKILL"), "{silent}");
}

#[test]
fn it_keeps_the_descriptors_that_it_was_given() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "given").unwrap();
    let file = fs::File::open(dir.path().join("file")).unwrap();
    let read = || {
        io::read_to_string(&file)
            .map(String::into_bytes)
            .map_err(|e| e.to_string())
    };
    let sandbox = Sandbox::default();
    let given = sandbox.start_with(&[file.as_raw_fd()], read).unwrap();
    assert_eq!(given.finish(LONG).unwrap(), b"given");
    assert!(sandbox.run(LONG, read).is_err());
}
