//! Compares the versions of other programs with those that cryopod was tested with (docs/compatibility.md).

use std::time::Duration;

use cryopod_host::programs::Tools;
use cryopod_operations::facts;

use super::Line;

/// Program, oldest and newest tested version.
const TESTED: [(&str, [u32; 2], [u32; 2]); 6] = [
    ("criu", [4, 1], [4, 3]),
    ("runc", [1, 1], [1, 4]),
    ("crun", [1, 21], [1, 28]),
    ("podman", [5, 4], [6, 1]),
    ("containerd", [1, 7], [2, 1]),
    ("docker", [26, 1], [28, 5]),
];

/// Returns one line: the tested versions, and what is newer here.
pub fn line(tools: &dyn Tools, limit: Duration) -> Line {
    let dotted = |[major, minor]: [u32; 2]| format!("{major}.{minor}");
    let range = |(name, oldest, newest)| format!("{name} {} to {}", dotted(oldest), dotted(newest));
    let tested = TESTED.map(range).join(", ");
    let newer: Vec<String> = TESTED
        .iter()
        .filter_map(|(name, _, newest)| {
            let path = tools.find(name)?;
            let found = facts::numbers(&facts::version_line(tools, &path, limit)?)?;
            let found = [*found.first()?, found.get(1).copied().unwrap_or(0)];
            (found > *newest).then(|| format!("{name} {}", dotted(found)))
        })
        .collect();
    match newer.is_empty() {
        true => Line::ok("tested versions", tested),
        false => Line::note(
            "tested versions",
            format!(
                "{} is newer than what was tested: {tested}",
                newer.join(", ")
            ),
            "restore a checkpoint of a container that you can lose before you rely on it",
        ),
    }
}
