//! Checks whether this host's CPU has the instruction sets of the checkpoint's.
//!
//! A program, and the C library for each one, asks for them at its start and keeps the answer. CRIU compares them only
//! with `cpu-cap`. On a CPU without one the restored process ends by SIGILL, perhaps much later.

use std::collections::BTreeSet;

use cryopod_archive::metadata::HostFacts;
use cryopod_host::files::Host;

use super::compat::{Check, Verdict};
use super::switches::{CPU, Switches};

/// How the names of x86's instruction sets begin in `/proc/cpuinfo`. Its other flags tell of the kernel, of virtual machines and
/// of power: they differ between hosts on which the same programs run.
const PREFIXES: [&str; 23] = [
    "abm",
    "adx",
    "aes",
    "amx",
    "avx",
    "bmi",
    "clflushopt",
    "clwb",
    "f16c",
    "fma",
    "gfni",
    "movbe",
    "movdir",
    "pclmul",
    "popcnt",
    "rdrand",
    "rdseed",
    "sha",
    "sse",
    "ssse",
    "vaes",
    "vpclmul",
    "waitpkg",
];
/// Others, whole: longer names are not for programs.
const NAMES: [&str; 7] = [
    "cx16",
    "lahf_lm",
    "rdpid",
    "serialize",
    "xsave",
    "xsavec",
    "xsaveopt",
];

/// At most so many are named.
const MAX_TOLD: usize = 40;

/// Returns the instruction sets of the first CPU; none for one that is not x86.
pub fn features(host: &Host) -> BTreeSet<String> {
    let text = host.text("/proc/cpuinfo").unwrap_or_default();
    let line = text
        .lines()
        .find(|line| line.starts_with("flags"))
        .and_then(|l| l.split_once(':'));
    let words = line.map_or("", |(_, words)| words).split_whitespace();
    let known = |word: &&str| PREFIXES.iter().any(|p| word.starts_with(p)) || NAMES.contains(word);
    words.filter(known).map(str::to_owned).collect()
}

/// Compares them; `None` if the checkpoint does not say.
pub fn check(recorded: &HostFacts, host: &Host, switches: &Switches) -> Option<Check> {
    if recorded.cpu.is_empty() {
        return None;
    }
    let here = features(host);
    let lacks = recorded.cpu.iter().filter(|name| !here.contains(*name));
    let lacks: Vec<&str> = lacks.map(String::as_str).take(MAX_TOLD).collect();
    let verdict = match lacks.is_empty() {
        true => Verdict::Ok,
        false if here.is_empty() => Verdict::Unknown,
        false if switches.on(CPU) => Verdict::Refused,
        false => Verdict::Relaxed,
    };
    let found = match verdict {
        Verdict::Ok => "all of them".to_owned(),
        Verdict::Unknown => "unknown ones".to_owned(),
        _ => format!("none of {}", lacks.join(", ")),
    };
    Some(Check {
        name: CPU.into(),
        subject: String::new(),
        recorded: format!("{} instruction sets", recorded.cpu.len()),
        found,
        verdict,
        switch: Some(Switches::how(CPU)),
        remedy: "restore on a CPU that has them: the processes would end by SIGILL".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn a_cpu_that_lacks_an_instruction_set_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let proc = dir.path().join("proc");
        let flags = |words: &str| {
            let of = format!("flags\t\t: {words}\n");
            let all = format!("processor\t: 0\n{of}vmx flags\t: x\n\nprocessor\t: 1\n{of}");
            proc.put("cpuinfo", all);
        };
        flags("fpu pti avx2 avx512f amx_tile ibpb");
        let recorded = HostFacts {
            cpu: features(&host).into_iter().collect(),
            ..HostFacts::default()
        };
        assert_eq!(recorded.cpu, ["amx_tile", "avx2", "avx512f"]);
        let judge = |switches: &Switches| check(&recorded, &host, switches).unwrap();
        let on = Switches::default();
        assert_eq!(judge(&on).verdict, Verdict::Ok);
        flags("avx2 sse4_2");
        let told = judge(&on).refusal().unwrap().to_string();
        for word in ["none of amx_tile, avx512f", "SIGILL", "`cpu = false`"] {
            assert!(told.contains(word), "{told}");
        }
        let off = on.clone().without(&[CPU.into()]);
        assert_eq!(judge(&off).verdict, Verdict::Relaxed);
        assert!(
            check(&HostFacts::default(), &host, &on).is_none(),
            "of an earlier cryopod"
        );
        proc.put("cpuinfo", "");
        assert_eq!(judge(&on).verdict, Verdict::Unknown);
    }
}
