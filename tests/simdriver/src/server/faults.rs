//! The switches that make the simulated driver misbehave, and what each does to a step.
//!
//! A switch is written `NAME[=VALUE][:COUNT][/SKIP][@PID]`: it acts COUNT times (for ever without),
//! after it let SKIP matching steps pass, and only on the process PID if one is given.

use std::str::FromStr;

use anyhow::Context;
use serde::Serialize;
use strum::VariantArray;

use crate::abi;
use crate::wire::{Step, directive};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    pub name: String,
    /// A result code by name or number, milliseconds or bytes per second.
    pub value: Option<String>,
    pub count: Option<u64>,
    /// How many matching steps it still lets pass.
    pub skip: u64,
    pub pid: Option<i32>,
}

pub const HELP: &str = "\
fail-STEP[=CODE]     the step returns CODE and changes nothing
break-STEP[=CODE]    the step returns CODE and leaves the process in the failed state
hang-STEP            the step does not end; a lock gives up at its timeout (CUDA_ERROR_NOT_READY)
hang-lock-forever    a lock that does not look at its timeout
slow-STEP=MS         the step takes MS longer
oom-restore          restore returns CUDA_ERROR_OUT_OF_MEMORY; every later try CUDA_ERROR_OPERATING_SYSTEM
cuinit-race          lock returns CUDA_ERROR_ILLEGAL_STATE (once unless a count is given)
STEP is init, get-state (fail and slow only), lock, checkpoint, restore, unlock, unmap (cuMemUnmap), export (cuMemExportToShareableHandle), launch (cuLaunchKernel), synchronize (cuCtxSynchronize). NAME[=VALUE][:COUNT][/SKIP][@PID]";

impl FromStr for Fault {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let number = |what: &str, s: &str| {
            s.parse::<u64>()
                .with_context(|| format!("{text:?}: {what} {s:?} is not a number"))
        };
        fn split(rest: &str, mark: char) -> (&str, Option<&str>) {
            rest.split_once(mark)
                .map_or((rest, None), |(r, part)| (r, Some(part)))
        }
        let (rest, pid) = split(text, '@');
        let (rest, skip) = split(rest, '/');
        let (rest, count) = split(rest, ':');
        let (name, value) = split(rest, '=');
        let pid = pid.map(str::parse).transpose();
        let pid = pid.with_context(|| format!("{text:?}: no pid after @"))?;
        let count = count.map(|c| number("count", c)).transpose()?;
        let mut fault = Self {
            name: name.to_owned(),
            value: value.map(str::to_owned),
            count,
            skip: skip.map_or(Ok(0), |s| number("skip", s))?,
            pid,
        };
        if name == "cuinit-race" && count.is_none() {
            fault.count = Some(1);
        }
        match Step::VARIANTS.iter().any(|s| effect(&fault, *s).is_some()) {
            true => Ok(fault),
            false => anyhow::bail!("no such switch: {text:?}\n{HELP}"),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// One of [`directive`].
    pub directive: u64,
    pub code: i32,
    /// Milliseconds to add.
    pub delay_ms: u64,
}

/// What this switch does to this step, if anything.
fn effect(f: &Fault, step: Step) -> Option<Verdict> {
    let code = |default: i32| match &f.value {
        None => Some(default),
        Some(v) => abi::code_of(v).or_else(|| v.parse().ok()),
    };
    let number = || f.value.as_ref().and_then(|v| v.parse::<u64>().ok());
    let verdict = |directive, code| Verdict {
        directive,
        code,
        ..Verdict::default()
    };
    let on = |of: Step, directive, code| (of == step).then_some(verdict(directive, code));
    match f.name.as_str() {
        "oom-restore" => {
            let code = abi::CUDA_ERROR_OUT_OF_MEMORY;
            return on(Step::Restore, directive::FAIL, code);
        }
        "cuinit-race" => return on(Step::Lock, directive::FAIL, abi::CUDA_ERROR_ILLEGAL_STATE),
        "hang-lock-forever" => return on(Step::Lock, directive::HANG_FOREVER, 0),
        _ => {}
    }
    let (verb, of) = f.name.split_once('-')?;
    if of != step.as_ref() {
        return None;
    }
    let failure = match step {
        Step::Lock | Step::Checkpoint | Step::GetState => abi::CUDA_ERROR_OPERATING_SYSTEM,
        _ => abi::CUDA_ERROR_UNKNOWN,
    };
    Some(match verb {
        "fail" => verdict(directive::FAIL, code(failure)?),
        "break" if step != Step::GetState => {
            verdict(directive::BREAK, code(abi::CUDA_ERROR_UNKNOWN)?)
        }
        "hang" if step == Step::Lock => verdict(directive::HANG, 0),
        "hang" if step != Step::GetState => verdict(directive::HANG_FOREVER, 0),
        "slow" => Verdict {
            delay_ms: number()?,
            ..Verdict::default()
        },
        _ => return None,
    })
}

/// The switches that are set, in the order in which they were.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Faults(pub Vec<Fault>);

impl Faults {
    /// Sets a switch; one of the same name and process is replaced.
    pub fn set(&mut self, f: Fault) {
        self.0.retain(|g| g.name != f.name || g.pid != f.pid);
        self.0.push(f);
    }

    /// Unsets every switch of this name, or all.
    pub fn clear(&mut self, name: Option<&str>) {
        self.0.retain(|f| name.is_some_and(|n| n != f.name));
    }

    /// What happens to this step of this process now, and the names of the switches that acted.
    pub fn decide(&mut self, step: Step, pid: i32) -> (Verdict, Vec<String>) {
        let mut out = Verdict::default();
        let mut acted = Vec::new();
        for f in &mut self.0 {
            let Some(v) = effect(f, step) else { continue };
            if f.pid.is_some_and(|p| p != pid) || f.count == Some(0) {
                continue;
            }
            if f.skip > 0 {
                f.skip -= 1;
                continue;
            }
            if v.directive != directive::PROCEED {
                if out.directive != directive::PROCEED {
                    continue;
                }
                (out.directive, out.code) = (v.directive, v.code);
            }
            out.delay_ms += v.delay_ms;
            f.count = f.count.map(|c| c - 1);
            acted.push(f.name.clone());
        }
        // A hang with a count stays set until it is cleared, so that its end can be told.
        self.0
            .retain(|f| f.count != Some(0) || f.name.starts_with("hang-"));
        (out, acted)
    }

    /// Whether a switch still makes this step hang.
    pub fn hangs(&self, step: Step, pid: i32) -> bool {
        self.0.iter().any(|f| {
            f.pid.is_none_or(|p| p == pid)
                && effect(f, step).is_some_and(|v| {
                    matches!(v.directive, directive::HANG | directive::HANG_FOREVER)
                })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_skips_and_pids() {
        let mut f = Faults::default();
        f.set(
            "fail-checkpoint=CUDA_ERROR_NOT_READY:2/1@77"
                .parse()
                .unwrap(),
        );
        assert_eq!(f.decide(Step::Checkpoint, 5).0, Verdict::default());
        assert_eq!(f.decide(Step::Lock, 77).0, Verdict::default());
        assert_eq!(f.decide(Step::Checkpoint, 77).0, Verdict::default());
        for _ in 0..2 {
            let (v, acted) = f.decide(Step::Checkpoint, 77);
            assert_eq!((v.directive, v.code), (directive::FAIL, 600));
            assert_eq!(acted, ["fail-checkpoint"]);
        }
        assert_eq!(f.decide(Step::Checkpoint, 77).0, Verdict::default());
        assert!(f.0.is_empty());
    }

    #[test]
    fn a_hang_lasts_until_cleared() {
        let mut f = Faults::default();
        f.set("hang-lock:1".parse().unwrap());
        assert_eq!(f.decide(Step::Lock, 1).0.directive, directive::HANG);
        assert!(f.hangs(Step::Lock, 1));
        assert_eq!(f.decide(Step::Lock, 1).0.directive, directive::PROCEED);
        f.clear(Some("hang-lock"));
        assert!(!f.hangs(Step::Lock, 1));
    }
}
