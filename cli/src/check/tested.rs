//! Compares the versions of other programs with those that cryopod was tested with (docs/compatibility.md).

use std::time::Duration;

use cryopod_host::programs::Tools;
use cryopod_operations::criu;

use super::ReportLine;

/// Program, oldest and newest tested version.
const TESTED: [(&str, [u32; 2], [u32; 2]); 6] = [
    ("criu", [4, 1], [4, 3]),
    ("runc", [1, 1], [1, 4]),
    ("crun", [1, 21], [1, 28]),
    ("podman", [4, 3], [6, 1]),
    ("containerd", [1, 7], [2, 1]),
    ("docker", [26, 1], [28, 5]),
];

/// Returns one line: the tested versions, and what is newer here.
pub fn line(tools: &dyn Tools, limit: Duration) -> ReportLine {
    let dotted = |[major, minor]: [u32; 2]| format!("{major}.{minor}");
    let range = |(name, oldest, newest)| format!("{name} {} to {}", dotted(oldest), dotted(newest));
    let tested = TESTED.map(range).join(", ");
    let mut others = Vec::new();
    for (name, oldest, newest) in TESTED {
        let found = tools
            .find(name)
            .and_then(|path| criu::version_line(tools, &path, limit))
            .and_then(|line| criu::numbers(&line));
        let Some(&[major, ref rest @ ..]) = found.as_deref() else {
            continue;
        };
        let found = [major, rest.first().copied().unwrap_or(0)];
        // An older CRIU is no matter of trying it out; `criu` has a line of its own.
        if found > newest {
            others.push(format!("{name} {} is newer", dotted(found)));
        } else if found < oldest && name != "criu" {
            others.push(format!("{name} {} is older", dotted(found)));
        }
    }
    match others.is_empty() {
        true => ReportLine::ok("tested versions", tested),
        false => ReportLine::note(
            "tested versions",
            format!("{} than what was tested: {tested}", others.join(", ")),
            "restore a checkpoint of a container that you can lose before you rely on it",
        ),
    }
}
