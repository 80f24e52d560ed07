use super::*;
use cryopod_host::limited::wait_until;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A process that answers each line with "N line", so that changes to it show.
fn echo() -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new("sh")
        .args([
            "-c",
            "n=0; while read -r line; do n=$((n + 1)); echo $n $line; done",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    (child, out)
}

fn answers(child: &mut Child, out: &mut impl BufRead, expected: &str) {
    child.stdin.as_mut().unwrap().write_all(b"hello\n").unwrap();
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, expected);
}

#[test]
fn mappings_of_another_process_are_exchanged() {
    if !SUPPORTED {
        return;
    }
    let (mut child, mut out) = echo();
    let pid = child.id() as i32;
    answers(&mut child, &mut out, "1 hello\n");
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    file.write_all_at(b"shared", 4096).unwrap();
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let fds = || {
        std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .count()
    };
    let before = fds();

    // In the middle of a read, which goes on afterwards.
    let address = 0x1234_5600_0000;
    {
        let _seized = Seized::new(pid).unwrap();
        let mut inject = Injection::begin(pid, pid, 0).unwrap();
        assert_eq!(inject.call(libc::SYS_getpid, [0; 6]).unwrap(), pid as u64);
        let error = inject
            .call(libc::SYS_close, [9999, 0, 0, 0, 0, 0])
            .unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        inject.map_file(address, 8192, &file).unwrap();
        inject.end().unwrap();
    }
    let read = || {
        let mut bytes = [0; 6];
        memory
            .read_exact_at(&mut bytes, address + 4096)
            .map(|()| bytes)
    };
    assert_eq!(&read().unwrap(), b"shared");
    assert_eq!(fds(), before);
    answers(&mut child, &mut out, "2 hello\n");

    let _ = {
        let _seized = Seized::new(pid).unwrap();
        let mut inject = Injection::begin(pid, pid, 0).unwrap();
        inject.map_empty(address, 8192).unwrap();
        assert!(read().is_err() || read().unwrap() == [0; 6]);
        inject.map_private(address, 8192).unwrap();
        assert_eq!(&read().unwrap(), &[0; 6]);
        inject.map_file(address, 8192, &file).unwrap();
        assert_eq!(&read().unwrap(), b"shared");
        inject.unmap(address, 8192).unwrap();
        assert!(read().is_err());
        inject.end()
    };
    answers(&mut child, &mut out, "3 hello\n");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// Another thread of the process can change the code that the call is made from, while the call runs.
#[test]
fn a_process_that_changes_its_code_makes_no_other_call() {
    if !SUPPORTED {
        return;
    }
    let (mut child, mut out) = echo();
    let pid = child.id() as i32;
    answers(&mut child, &mut out, "1 hello\n");
    {
        let _seized = Seized::new(pid).unwrap();
        let mut inject = Injection::begin(pid, pid, 0).unwrap();
        let mut code = [0; 16];
        inject.memory.read_exact_at(&mut code, inject.site).unwrap();
        let changed: &[&[u8]] = &[
            // Another call: mov eax, close; mov edi, 0; syscall.
            &[
                0xb8,
                libc::SYS_close as u8,
                0,
                0,
                0,
                0xbf,
                0,
                0,
                0,
                0,
                0x0f,
                0x05,
            ],
            // Another argument: mov edi, 0; syscall.
            &[0xbf, 0, 0, 0, 0, 0x0f, 0x05],
            // The same call from elsewhere: nop; syscall.
            &[0x90, 0x0f, 0x05],
        ];
        for bytes in changed {
            inject.memory.write_all_at(bytes, inject.site).unwrap();
            let error = inject
                .call(libc::SYS_getpgid, [1, 0, 0, 0, 0, 0])
                .unwrap_err();
            assert!(error.to_string().contains("another system call"), "{error}");
            inject.memory.write_all_at(&code, inject.site).unwrap();
        }
        // Its own code again: works as before.
        assert_eq!(inject.call(libc::SYS_getpid, [0; 6]).unwrap(), pid as u64);
        inject.end().unwrap();
    }
    // Its standard input was not closed.
    answers(&mut child, &mut out, "2 hello\n");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// The tracer of [`a_thread_outlives_its_tracer_wherever_that_is_killed`]: dies at one of its steps.
#[test]
#[ignore = "a part of another test"]
fn dying_tracer() {
    let number = |name| std::env::var(name).unwrap().parse::<i32>().unwrap();
    let (pid, last) = (number("TRACED"), number("LAST_STEP"));
    let at = |step: i32| {
        if step == last {
            // SAFETY: kills this process.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    };
    let _seized = Seized::new(pid).unwrap();
    at(0);
    let inject = Injection::begin(pid, pid, 0).unwrap();
    assert!(inject.frame.is_some());
    at(1);
    let mut regs = inject.regs;
    arch::set_stack(&mut regs, inject.frame.as_ref().unwrap().address());
    arch::prepare_call(&mut regs, inject.site, libc::SYS_getpid as u64, [0; 6]);
    arch::set(pid, &regs).unwrap();
    at(2);
    inject.next_stop().unwrap();
    at(3);
    inject.next_stop().unwrap();
    at(4);
    inject.end().unwrap();
    at(5);
}

#[test]
fn a_process_that_is_ended_runs_no_further() {
    use std::os::unix::process::ExitStatusExt;
    if !SUPPORTED {
        return;
    }
    let (child, mut out) = echo();
    exit(child.id() as i32, 143, || {}).unwrap();
    assert_eq!(
        out.read_line(&mut String::new()).unwrap(),
        0,
        "it has ended"
    );
    // A tracer is a thread. Its panic is its end, as a KILL is that of all threads.
    for dies_in_call in [false, true] {
        let (mut child, _out) = echo();
        let pid = child.id() as i32;
        let tracer = std::thread::spawn(move || {
            if !dies_in_call {
                return exit(pid, 143, || panic!("killed")).unwrap();
            }
            ptrace(libc::PTRACE_SEIZE, pid, 0, O_EXITKILL).unwrap();
            ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0).unwrap();
            trace::interrupted(pid).unwrap();
            let injection = Injection::begin(pid, pid, O_EXITKILL).unwrap();
            injection.enter(libc::SYS_getpid, [0; 6]).unwrap();
        });
        let _ = tracer.join();
        let pause = Duration::from_millis(20);
        assert!(wait_until(Duration::from_secs(60), pause, || {
            child.try_wait().unwrap().is_some()
        }));
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }
}

/// Adds numbers up, in the floating point registers, and tells when a sum is another one.
#[test]
#[ignore = "a part of another test"]
fn adding_up() {
    let sum = || {
        (1..2_000_000u32).fold([0.0f64; 4], |sums, n| {
            std::array::from_fn(|i| sums[i] + 1.0 / f64::from(n + i as u32))
        })
    };
    let first = sum();
    let start = std::time::Instant::now();
    while !std::path::Path::new(&std::env::var("UNTIL").unwrap()).exists() {
        assert_eq!(sum(), first);
        // The test has failed.
        assert!(start.elapsed().as_secs() < 1200);
    }
}

#[test]
fn a_thread_outlives_its_tracer_wherever_that_is_killed() {
    if !SUPPORTED {
        return;
    }
    let part = |name: &str| {
        let mut part = Command::new(std::env::current_exe().unwrap());
        part.args(["--exact", "--ignored", &format!("inject::tests::{name}")]);
        part.stdout(Stdio::null());
        part
    };
    let dir = tempfile::tempdir().unwrap();
    let until = dir.path().join("until");
    let (mut reading, mut out) = echo();
    let mut computing = part("adding_up").env("UNTIL", &until).spawn().unwrap();
    for round in 0..5 {
        for step in 0..=5 {
            // The test's own thread is the one that adds up.
            for pid in [reading.id(), last_thread(computing.id())] {
                let mut tracer = part("dying_tracer");
                tracer
                    .env("TRACED", pid.to_string())
                    .env("LAST_STEP", step.to_string());
                let ended = tracer.status().unwrap();
                assert!(!ended.success(), "step {step}");
            }
            let n = round * 6 + step + 1;
            answers(&mut reading, &mut out, &format!("{n} hello\n"));
        }
    }
    std::fs::write(&until, "").unwrap();
    assert!(computing.wait().unwrap().success());
    drop(reading.stdin.take());
    assert!(reading.wait().unwrap().success());
}

fn last_thread(pid: u32) -> u32 {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    loop {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let tids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        if let Some(tid) = tids.filter(|tid: &u32| *tid != pid).max() {
            return tid;
        }
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
#[ignore = "a part of another test"]
fn many_threads() {
    let sleep = || std::thread::sleep(std::time::Duration::from_secs(120));
    let all: Vec<_> = (0..7).map(|_| std::thread::spawn(sleep)).collect();
    println!("ready");
    all.into_iter().for_each(|one| one.join().unwrap());
}

/// The last thread of such a process waits until all others are gone, also for its tracer.
#[test]
fn the_first_process_of_a_pid_namespace_ends_with_all_its_threads() {
    // Of this thread's children; only root may.
    if !SUPPORTED || nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWPID).is_err() {
        return;
    }
    let mut init = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--ignored",
            "--nocapture",
            "inject::tests::many_threads",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(init.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")));
    exit(init.id() as i32, 7, || {}).unwrap();
    // Reaped before, as this is its parent.
    assert!(init.wait().is_err());
}

#[test]
#[cfg(target_arch = "x86_64")]
fn only_a_threads_own_stack_is_written_below() {
    let memory = File::open("/proc/self/mem").unwrap();
    let room = |stack: u64| {
        // SAFETY: registers are numbers.
        let mut regs: arch::Registers = unsafe { std::mem::zeroed() };
        // SAFETY: takes nothing.
        (regs.rsp, regs.fs_base) = (stack, unsafe { libc::pthread_self() } as u64);
        let pid = std::process::id() as i32;
        let code = Code::find(pid, &memory, &regs).unwrap();
        code.stack
    };
    let local = 0u64;
    let own = &raw const local as u64;
    assert!(room(own).contains(&own));
    let others = vec![0u8; 1 << 20];
    assert!(room(others.as_ptr() as u64 + (1 << 19)).is_empty());
}
