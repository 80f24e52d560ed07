//! Gives each process no more than the spec's limits: resource limits, score for the out-of-memory killer, scheduling.
//!
//! CRIU sets what the images say, as root. A process cannot tell a limit that was lowered before it was restored from one
//! that another process has lowered, so these are adjusted, not refused.

use cryopod_archive::criu::message::Message;
use nix::sys::resource::{Resource, getrlimit};
use serde_json::Value;

use super::{CheckedImages, Subject};
use crate::security::ceiling::CredentialsCeiling;

/// Limits in the kernel's order, as CRIU has them.
const RESOURCES: [(&str, Resource); 16] = [
    ("RLIMIT_CPU", Resource::RLIMIT_CPU),
    ("RLIMIT_FSIZE", Resource::RLIMIT_FSIZE),
    ("RLIMIT_DATA", Resource::RLIMIT_DATA),
    ("RLIMIT_STACK", Resource::RLIMIT_STACK),
    ("RLIMIT_CORE", Resource::RLIMIT_CORE),
    ("RLIMIT_RSS", Resource::RLIMIT_RSS),
    ("RLIMIT_NPROC", Resource::RLIMIT_NPROC),
    ("RLIMIT_NOFILE", Resource::RLIMIT_NOFILE),
    ("RLIMIT_MEMLOCK", Resource::RLIMIT_MEMLOCK),
    ("RLIMIT_AS", Resource::RLIMIT_AS),
    ("RLIMIT_LOCKS", Resource::RLIMIT_LOCKS),
    ("RLIMIT_SIGPENDING", Resource::RLIMIT_SIGPENDING),
    ("RLIMIT_MSGQUEUE", Resource::RLIMIT_MSGQUEUE),
    ("RLIMIT_NICE", Resource::RLIMIT_NICE),
    ("RLIMIT_RTPRIO", Resource::RLIMIT_RTPRIO),
    ("RLIMIT_RTTIME", Resource::RLIMIT_RTTIME),
];
/// Scheduling policies that are no real-time ones: `SCHED_OTHER`, `SCHED_BATCH`, `SCHED_IDLE`.
const ORDINARY: [u64; 3] = [0, 3, 5];

/// Returns what is wrong: a list of limits of another length than the kernel's, whose entries would be for other resources.
pub fn settle(
    images: &mut CheckedImages,
    subject: Subject<'_>,
    ceiling: &CredentialsCeiling,
) -> Vec<String> {
    let mut told = Vec::new();
    let spec = subject.spec.json();
    let hard = hard_limits(spec);
    let score = spec.pointer("/process/oomScoreAdj").and_then(Value::as_i64);
    let score = score.or(subject.facts.oom_score).unwrap_or(0);
    let nice = lowest_nice();
    let names = images.names("core-");
    for name in names {
        for core in images.messages_mut(&name) {
            if let Some(task) = core.message_mut("tc") {
                let count = task
                    .message("rlimits")
                    .map(|l| l.messages("rlimits").count());
                if count.is_some_and(|n| n != RESOURCES.len()) {
                    told.push(format!("{name}: does not have a limit for each resource"));
                }
                // A login user id is the host's, for its audit.
                task.remove("loginuid");
                if !ceiling.has("SYS_RESOURCE") {
                    lower_limits(task, &hard);
                    let own = task.number("oom_score_adj").unwrap_or(0).cast_signed();
                    if own < score {
                        task.set_number("oom_score_adj", score.cast_unsigned());
                    }
                }
            }
            if let Some(thread) = core.message_mut("thread_core")
                && !ceiling.has("SYS_NICE")
                && !spec
                    .pointer("/process/scheduler")
                    .is_some_and(Value::is_object)
            {
                make_ordinary(thread, nice);
            }
        }
    }
    told
}

/// The hard limit of each resource: the spec's, and where it has none that of this process, which a new container would
/// get.
fn hard_limits(spec: &Value) -> Vec<u64> {
    let of_spec = spec.pointer("/process/rlimits").and_then(Value::as_array);
    let limit = |(name, resource): &(&str, Resource)| {
        let mut named = of_spec.into_iter().flatten().filter(|l| l["type"] == *name);
        let hard = named.next().and_then(|l| l["hard"].as_u64());
        hard.or_else(|| Some(getrlimit(*resource).ok()?.1))
            .unwrap_or(u64::MAX)
    };
    RESOURCES.iter().map(limit).collect()
}

fn lower_limits(task: &mut Message, hard: &[u64]) {
    let Some(limits) = task.message_mut("rlimits") else {
        return;
    };
    for (limit, most) in limits.messages_mut("rlimits").zip(hard) {
        for field in ["cur", "max"] {
            if limit.number(field).is_some_and(|n| n > *most) {
                limit.set_number(field, *most);
            }
        }
    }
}

/// The lowest nice value that needs no right: this process's, which a new container would get. It is in zigzag form, as
/// CRIU has it.
fn lowest_nice() -> u64 {
    let own = rustix::process::getpriority_process(None).unwrap_or(0);
    (2 * u64::from(own.min(0).unsigned_abs())).saturating_sub(1)
}

/// Takes away a real-time policy, and a nice value below `lowest`.
fn make_ordinary(thread: &mut Message, lowest: u64) {
    if thread
        .number("sched_policy")
        .is_some_and(|p| !ORDINARY.contains(&p))
    {
        thread.set_number("sched_policy", 0);
        thread.remove("sched_prio");
    }
    let is_negative = |zigzag: u64| zigzag & 1 == 1;
    let nice = thread.number("sched_nice");
    if nice.is_some_and(|n| is_negative(n) && n > lowest) {
        thread.set_number("sched_nice", lowest);
    }
}

#[cfg(test)]
mod tests {
    use cryopod_archive::criu::schema::MessageType;

    use super::*;

    #[test]
    fn a_nice_value_goes_no_lower_than_a_new_containers() {
        let nice = |zigzag, lowest| {
            let bytes = [8, 0, 16, 0, 24, zigzag];
            let of = MessageType::named("thread_core_entry").unwrap();
            let mut thread = Message::read(of, &bytes).unwrap();
            make_ordinary(&mut thread, lowest);
            thread.number("sched_nice").unwrap()
        };
        let (of_minus_2, of_minus_19, of_19) = (3, 37, 38);
        assert_eq!(nice(of_minus_2, 0), 0);
        assert_eq!(nice(of_minus_2, 3), 3);
        assert_eq!(nice(of_minus_19, 3), 3);
        assert_eq!(nice(of_19, 0), 38);
    }

    #[test]
    fn the_value_of_this_process_in_zigzag_form() {
        let own = rustix::process::nice(0).unwrap();
        let zigzag = if own < 0 { -2 * own - 1 } else { 0 };
        assert_eq!(lowest_nice(), zigzag as u64);
    }
}
