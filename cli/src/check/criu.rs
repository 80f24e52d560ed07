//! Checks CRIU: which one is used, whether it is new enough, and whether the kernel has what it needs.

use std::ffi::OsStr;
use std::path::Path;

use cryopod_operations::criu;
use cryopod_operations::criu::program;

use super::{CheckInput, LIMIT, ReportLine};

/// The oldest CRIU that the plugin works with.
const OLDEST_CRIU: [u32; 2] = [4, 1];
const NEW_ENOUGH: &str = "install the package cryopod-criu, or, if it is 4.1 or newer, install the criu package of the distribution";

pub fn check(input: &CheckInput<'_>, lines: &mut Vec<ReportLine>) {
    let Some(criu) = criu::find(input.tools, LIMIT) else {
        lines.push(ReportLine::missing("criu", "not found on PATH", NEW_ENOUGH));
        return;
    };
    let at = whose(&criu.path, input.hosts_own.as_deref());
    match criu
        .version
        .as_deref()
        .map(|v| (v, criu::numbers(v).unwrap_or_default()))
    {
        Some((v, n)) if n.as_slice() >= OLDEST_CRIU.as_slice() => {
            lines.push(ReportLine::ok("criu", format!("{v} at {at}")))
        }
        Some((v, _)) => lines.push(ReportLine::missing(
            "criu",
            format!("{v} at {at}"),
            NEW_ENOUGH,
        )),
        None => {
            lines.push(ReportLine::missing(
                "criu",
                format!("that at {at} does not say its version"),
                NEW_ENOUGH,
            ));
            return;
        }
    }
    if !input.root {
        return;
    }
    lines.push(
        match input
            .tools
            .output(&criu.path, &[OsStr::new("check")], LIMIT)
        {
            Ok(out) if out.code == 0 => ReportLine::ok("kernel", "criu check: looks good"),
            Ok(out) => {
                let said = out
                    .stderr
                    .lines()
                    .chain(out.stdout.lines())
                    .find(|l| l.contains("Error"))
                    .unwrap_or("no reason given")
                    .to_owned();
                ReportLine::missing(
                    "kernel",
                    format!("criu check: {said}"),
                    "run `criu check --all` and use a kernel with CONFIG_CHECKPOINT_RESTORE",
                )
            }
            Err(e) => ReportLine::missing("kernel", e.to_string(), "run `criu check --all`"),
        },
    );
}

/// Tells where the CRIU is, and that it goes before the host's.
fn whose(path: &Path, hosts_own: Option<&Path>) -> String {
    let mut text = path.display().to_string();
    if path == Path::new(program::PACKAGED) {
        text.push_str(", of the package cryopod-criu");
    }
    if let Some(other) = hosts_own.filter(|other| *other != path) {
        text.push_str(&format!(", in place of {}", other.display()));
    }
    text
}

#[cfg(test)]
mod tests {
    use cryopod_host::files::Host;

    use super::super::CheckStatus;
    use super::super::tests::Says;
    use super::*;

    #[test]
    fn criu_must_be_there_and_new_enough() {
        for (says, want) in [
            (&[][..], CheckStatus::Missing),
            (&[("criu", "Version: 3.17.1\n")], CheckStatus::Missing),
            (&[("criu", "Version: 4.1.1\n")], CheckStatus::Ok),
            (&[("criu", "Version: 4.2\n")], CheckStatus::Ok),
            (&[("criu", "")], CheckStatus::Missing),
        ] {
            let mut lines = Vec::new();
            let input = CheckInput {
                host: &Host::at("/nowhere"),
                hosts_own: None,
                tools: &Says(says),
                root: true,
                has_library: &|_| true,
            };
            check(&input, &mut lines);
            let line = lines.iter().find(|l| l.name == "criu").unwrap();
            assert_eq!(line.status, want, "{says:?}");
        }
    }

    #[test]
    fn where_it_is() {
        let packaged = Path::new(program::PACKAGED);
        let own = Path::new("/usr/sbin/criu");
        assert_eq!(whose(own, Some(own)), "/usr/sbin/criu");
        assert_eq!(
            whose(packaged, Some(own)),
            "/usr/lib/cryopod/criu/criu, of the package cryopod-criu, in place of /usr/sbin/criu"
        );
    }
}
