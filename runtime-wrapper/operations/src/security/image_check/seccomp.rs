//! Puts the spec's seccomp profile on top of the filters in the images.
//!
//! CRIU installs the filters that the images hold; a stranger's may allow everything. The kernel runs all filters of a
//! process and takes the strictest answer, so the spec's own on top is enough. A checkpoint of the restored container has
//! it among its filters, and it is not added again.

use std::collections::BTreeMap;
use std::str::FromStr;

use cryopod_archive::criu::message::Message;
use cryopod_host::spec::Spec;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};
use serde_json::Value;

use super::CheckedImages;

const NAME: &str = "seccomp.img";
/// `SECCOMP_MODE_FILTER`.
const FILTER: u64 = 2;
/// CRIU's mark of a 32-bit process.
const COMPAT: u64 = 2;

const RETURN: u16 = 0x06;
const JUMP: u16 = 0x05;
/// `SECCOMP_RET_ALLOW`.
const ALLOW: u32 = 0x7fff_0000;
/// Bytes of a step of a program.
const STEP: usize = 8;
/// The kernel's `BPF_MAXINSNS`.
const MAX_STEPS: usize = 4096;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Returns what is wrong: the profile cannot be put on top of the images' filters.
pub fn settle(images: &mut CheckedImages, spec: &Spec) -> Vec<String> {
    let Some(profile) = spec
        .json()
        .pointer("/linux/seccomp")
        .filter(|p| p.is_object())
    else {
        return Vec::new();
    };
    let programs = match compile(profile) {
        Ok(programs) => programs,
        Err(e) => {
            return vec![format!(
                "{NAME}: the spec's seccomp profile cannot be put on top: {e}"
            )];
        }
    };
    let filters = images.messages_mut(NAME).first_mut();
    let Some(filters) = filters.filter(|_| !programs.is_empty()) else {
        return Vec::new(); // that a process has no filter is among the privileges
    };
    let mut told = Vec::new();
    let mut filters = std::mem::replace(filters, filters.clone());
    let mut tops: BTreeMap<u64, u64> = BTreeMap::new();
    for name in images.names("core-") {
        for core in images.messages_mut(&name) {
            let registers = core
                .message("thread_info")
                .and_then(|t| t.message("gpregs"));
            let is_compat = registers.and_then(|r| r.number("mode")) == Some(COMPAT);
            let Some(thread) = core.message_mut("thread_core") else {
                continue;
            };
            if thread.number("seccomp_mode") != Some(FILTER) {
                continue;
            }
            // CRIU does not ask whether the field is there.
            let head = thread.number("seccomp_filter").unwrap_or(0);
            if is_compat {
                told.push(format!("{name}: a 32-bit process, for whose system calls the spec's seccomp profile is not put on top"));
                continue;
            }
            let top = match tops.get(&head) {
                Some(top) => *top,
                None => match add(&mut filters, head, &programs) {
                    Ok(top) => *tops.entry(head).or_insert(top),
                    Err(what) => {
                        told.push(format!("{NAME}: {what}"));
                        continue;
                    }
                },
            };
            thread.set_number("seccomp_filter", top);
        }
    }
    if let Some(first) = images.messages_mut(NAME).first_mut() {
        *first = filters;
    }
    told
}

/// Returns the spec's profile as one program, as crun keeps it for `exec`; `None` if it allows everything.
///
/// # Errors
/// What cannot be compiled, or is longer than the kernel takes.
pub fn joined(spec: &Spec) -> Result<Option<Vec<u8>>, String> {
    let profile = spec.json().pointer("/linux/seccomp");
    let Some(profile) = profile.filter(|p| p.is_object()) else {
        return Ok(None);
    };
    let programs = compile(profile)?;
    let program = join(&programs);
    match program.len() / STEP {
        0 => Ok(None),
        1..=MAX_STEPS => Ok(Some(program)),
        steps => Err(format!("{steps} steps are more than the kernel takes")),
    }
}

/// Makes one program of several. The newest answers first, as its answer counts where two are equally strict; where it
/// allows a call, the next one decides.
fn join(programs: &[Vec<u8>]) -> Vec<u8> {
    let step = |code, k| {
        let (jt, jf) = (0, 0);
        bytes(&[sock_filter { code, jt, jf, k }])
    };
    let allow = step(RETURN, ALLOW);
    let mut all = Vec::new();
    for (age, program) in programs.iter().enumerate().rev() {
        let mut left = u32::try_from(program.len() / STEP).unwrap_or(u32::MAX);
        for one in program.chunks(STEP) {
            left -= 1;
            match age > 0 && one == allow {
                true => all.extend(step(JUMP, left)),
                false => all.extend(one),
            }
        }
    }
    all
}

/// Adds the programs to the chain that ends with the filter `head`. Returns the number of the last one.
fn add(filters: &mut Message, head: u64, programs: &[Vec<u8>]) -> Result<u64, String> {
    let all: Vec<Message> = filters.messages("seccomp_filters").cloned().collect();
    let at = |n: u64| usize::try_from(n).ok().and_then(|n| all.get(n));
    let like = at(head).ok_or_else(|| format!("has no filter {head}"))?;
    // The newest first.
    let mut next = Some(head);
    let has_all = programs.iter().rev().all(|program| {
        let filter = next.and_then(at);
        next = filter.and_then(|f| f.number("prev"));
        filter.and_then(|f| f.bytes("filter")) == Some(program)
    });
    if has_all {
        return Ok(head);
    }
    let mut top = head;
    for program in programs {
        // With its flags: it may be for all threads of the process.
        let mut filter = like.clone();
        filter.set_bytes("filter", program);
        filter.set_number("prev", top);
        top = filters.messages("seccomp_filters").count() as u64;
        filters.push("seccomp_filters", filter);
    }
    Ok(top)
}

/// Compiles an OCI profile. One program for what is allowed, and one for each other action, in the order in which they
/// are to be installed. Empty if the profile allows everything, or on a machine for which this is not known.
fn compile(profile: &Value) -> Result<Vec<Vec<u8>>, String> {
    if !cfg!(target_arch = "x86_64") {
        tracing::warn!(
            "the spec's seccomp profile is not put on top of the images' filters on this architecture"
        );
        return Ok(Vec::new());
    }
    let text = |of: &Value, key: &str| {
        of.get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let errno = |of: &Value, key: &str| {
        of.get(key)
            .and_then(Value::as_u64)
            .and_then(|n| u32::try_from(n).ok())
    };
    let default = action(
        &text(profile, "defaultAction"),
        errno(profile, "defaultErrnoRet"),
    )?;
    let mut known = Rules::new();
    let mut others: Vec<(SeccompAction, Rules)> = Vec::new();
    let groups = profile.get("syscalls").and_then(Value::as_array);
    for group in groups.into_iter().flatten() {
        let action = action(&text(group, "action"), errno(group, "errnoRet"))?;
        if action == default {
            continue;
        }
        let names = group
            .get("names")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        // Profiles name the calls of all machines.
        let numbers = names.filter_map(|n| syscalls::Sysno::from_str(n.as_str()?).ok());
        for number in numbers.map(|n| i64::from(n.id())) {
            insert(&mut known, number, rule(group)?);
            if action != SeccompAction::Allow {
                let at = match others.iter().position(|(of, _)| *of == action) {
                    Some(at) => at,
                    None => {
                        others.push((action.clone(), Rules::new()));
                        others.len() - 1
                    }
                };
                insert(&mut others[at].1, number, rule(group)?);
            }
        }
    }
    let highest = known.keys().next_back().copied().unwrap_or(0);
    let mut programs = Vec::new();
    for (action, rules) in others {
        programs.push(program(rules, SeccompAction::Allow, action)?);
    }
    if default != SeccompAction::Allow {
        programs.push(program(known, default.clone(), SeccompAction::Allow)?);
    }
    // Programs try calls that are newer than the profile, and do without those that the kernel does not have. runc answers
    // so as well. Of two errors the kernel takes that of the filter that was installed last.
    if default == SeccompAction::Errno(libc::EPERM.unsigned_abs()) {
        programs.push(unknown_calls(u32::try_from(highest).unwrap_or(0)));
    }
    Ok(programs)
}

fn program(
    rules: Rules,
    mismatch: SeccompAction,
    matched: SeccompAction,
) -> Result<Vec<u8>, String> {
    let filter = SeccompFilter::new(rules, mismatch, matched, TargetArch::x86_64);
    let program: Result<BpfProgram, _> = filter.and_then(TryInto::try_into);
    program.map(|p| bytes(&p)).map_err(|e| e.to_string())
}

/// Answers `ENOSYS` to calls above the highest that the profile names.
fn unknown_calls(highest: u32) -> Vec<u8> {
    const LOAD: u16 = 0x20;
    const IF_EQUAL: u16 = 0x15;
    const IF_GREATER: u16 = 0x25;
    const X86_64: u32 = 0xc000_003e;
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    bytes(&[
        step(LOAD, 0, 0, 4), // seccomp_data.arch
        step(IF_EQUAL, 0, 3, X86_64),
        step(LOAD, 0, 0, 0), // seccomp_data.nr
        step(IF_GREATER, 0, 1, highest),
        step(RETURN, 0, 0, 0x0005_0000 | libc::ENOSYS.unsigned_abs()),
        step(RETURN, 0, 0, ALLOW),
    ])
}

/// The program as the kernel takes it.
fn bytes(program: &[sock_filter]) -> Vec<u8> {
    let step = |s: &sock_filter| {
        let mut step = s.code.to_le_bytes().to_vec();
        step.extend([s.jt, s.jf]);
        step.extend(s.k.to_le_bytes());
        step
    };
    program.iter().flat_map(step).collect()
}

/// Adds a rule; `None` is one without conditions, beside which no other counts.
fn insert(rules: &mut Rules, number: i64, rule: Option<SeccompRule>) {
    match (rules.get_mut(&number), rule) {
        (Some(there), Some(_)) if there.is_empty() => {}
        (Some(there), Some(rule)) => there.push(rule),
        (_, None) => drop(rules.insert(number, Vec::new())),
        (None, Some(rule)) => drop(rules.insert(number, vec![rule])),
    }
}

/// Returns a group's conditions; `None` if it has none.
fn rule(group: &Value) -> Result<Option<SeccompRule>, String> {
    let args = group.get("args").and_then(Value::as_array);
    let args = args.map_or(&[][..], Vec::as_slice);
    if args.is_empty() {
        return Ok(None);
    }
    let condition = |arg: &Value| {
        let number = |key: &str| arg.get(key).and_then(Value::as_u64).unwrap_or(0);
        let (value, second) = (number("value"), number("valueTwo"));
        let op = arg.get("op").and_then(Value::as_str).unwrap_or_default();
        let (op, value) = match op {
            "SCMP_CMP_NE" => (SeccompCmpOp::Ne, value),
            "SCMP_CMP_LT" => (SeccompCmpOp::Lt, value),
            "SCMP_CMP_LE" => (SeccompCmpOp::Le, value),
            "SCMP_CMP_EQ" => (SeccompCmpOp::Eq, value),
            "SCMP_CMP_GE" => (SeccompCmpOp::Ge, value),
            "SCMP_CMP_GT" => (SeccompCmpOp::Gt, value),
            // The first value is the mask.
            "SCMP_CMP_MASKED_EQ" => (SeccompCmpOp::MaskedEq(value), second),
            other => return Err(format!("{other:?} is no comparison")),
        };
        let index = u8::try_from(number("index")).unwrap_or(u8::MAX);
        SeccompCondition::new(index, SeccompCmpArgLen::Qword, op, value).map_err(|e| e.to_string())
    };
    let conditions = args.iter().map(condition).collect::<Result<Vec<_>, _>>()?;
    SeccompRule::new(conditions)
        .map(Some)
        .map_err(|e| e.to_string())
}

fn action(name: &str, errno: Option<u32>) -> Result<SeccompAction, String> {
    Ok(match name {
        "SCMP_ACT_ALLOW" => SeccompAction::Allow,
        "SCMP_ACT_ERRNO" => SeccompAction::Errno(errno.unwrap_or(libc::EPERM.unsigned_abs())),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => SeccompAction::KillThread,
        "SCMP_ACT_KILL_PROCESS" => SeccompAction::KillProcess,
        "SCMP_ACT_LOG" => SeccompAction::Log,
        "SCMP_ACT_TRACE" => SeccompAction::Trace(errno.unwrap_or(libc::EPERM.unsigned_abs())),
        "SCMP_ACT_TRAP" => SeccompAction::Trap,
        other => return Err(format!("the action {other:?} is not known")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Runs a filter as the kernel does, for the steps that these programs have.
    fn run(program: &[u8], call: u32, args: [u64; 6]) -> u32 {
        let mut data = call.to_le_bytes().to_vec();
        data.extend(0xc000_003e_u32.to_le_bytes());
        data.extend(0u64.to_le_bytes());
        data.extend(args.iter().flat_map(|a| a.to_le_bytes()));
        let (mut at, mut a) = (0usize, 0u32);
        loop {
            let step = &program[at * 8..at * 8 + 8];
            let code = u16::from_le_bytes([step[0], step[1]]);
            let k = u32::from_le_bytes(step[4..8].try_into().unwrap());
            let branch = |yes: bool| usize::from(if yes { step[2] } else { step[3] });
            at += 1;
            match code {
                0x20 => {
                    a = u32::from_le_bytes(data[k as usize..k as usize + 4].try_into().unwrap())
                }
                0x05 => at += k as usize,
                0x15 => at += branch(a == k),
                0x25 => at += branch(a > k),
                0x35 => at += branch(a >= k),
                0x54 => a &= k,
                0x06 => return k,
                other => panic!("{other:#x}"),
            }
        }
    }

    /// What the kernel answers: of all filters the strictest, and of those the newest.
    fn answer(profile: &Value, call: &str, first: u64) -> u32 {
        let number = u32::try_from(syscalls::Sysno::from_str(call).unwrap().id()).unwrap();
        let all = compile(profile).unwrap();
        let answers = all
            .iter()
            .rev()
            .map(|p| run(p, number, [first, 0, 0, 0, 0, 0]));
        // The kernel compares them as signed numbers.
        let strictness = |answer: u32| (answer & 0xffff_0000).cast_signed();
        let answer = answers
            .reduce(|a, b| if strictness(b) < strictness(a) { b } else { a })
            .unwrap_or(ALLOW);
        let spec = Spec::from_json(json!({"linux": {"seccomp": profile}}));
        let joined = joined(&spec).unwrap();
        let same = joined.map_or(ALLOW, |p| run(&p, number, [first, 0, 0, 0, 0, 0]));
        assert_eq!(same, answer, "{call} in one program");
        answer
    }
    const ERRNO: u32 = 0x0005_0000;

    #[test]
    fn as_the_profile_says() {
        let profile = json!({
            "defaultAction": "SCMP_ACT_ERRNO",
            "syscalls": [
                {"names": ["read", "strange_call", "epoll_pwait2"], "action": "SCMP_ACT_ALLOW"},
                {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
                {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}]},
                {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 0x7e02_0000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]},
                {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
                {"names": ["reboot"], "action": "SCMP_ACT_KILL_PROCESS"},
            ]
        });
        for (call, first, want) in [
            ("read", 0, ALLOW),
            ("personality", 8, ALLOW),
            ("personality", 0, ALLOW),
            ("personality", 1, ERRNO | 1),
            ("clone", 0x11, ALLOW),
            ("clone", 0x0200_0000, ERRNO | 1),
            ("clone3", 0, ERRNO | 38),
            ("reboot", 0, 0x8000_0000),
            ("mount", 0, ERRNO | 1),
            // Newer than the profile.
            ("futex_waitv", 0, ERRNO | 38),
        ] {
            assert_eq!(answer(&profile, call, first), want, "{call} {first:#x}");
        }
        let open = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mount"], "action": "SCMP_ACT_ERRNO"}]});
        assert_eq!(answer(&open, "mount", 0), ERRNO | 1);
        assert_eq!(answer(&open, "read", 0), ALLOW);
        assert_eq!(
            compile(&json!({"defaultAction": "SCMP_ACT_ALLOW"})),
            Ok(vec![])
        );
        assert!(compile(&json!({"defaultAction": "SCMP_ACT_NOTIFY"})).is_err());
    }
}
