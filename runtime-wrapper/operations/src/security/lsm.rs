//! Passes AppArmor and SELinux labels on at a restore, and recognizes denials.

use std::path::Path;

use cryopod_archive::container::surroundings::LsmFacts;
use cryopod_host::files::Host;

const MAX_LOG: u64 = 64 << 20;

/// Returns the low-level runtime's flags for a container whose new spec has another label than its checkpoint: CRIU
/// would restore the old one. `is_given`: the command line has this flag.
pub fn flags(recorded: &LsmFacts, now: &LsmFacts, is_given: impl Fn(&str) -> bool) -> Vec<String> {
    let mut flags = Vec::new();
    let mut profile = |kind: &str, old: &Option<String>, new: &Option<String>| {
        if let (Some(old), Some(new)) = (old, new)
            && old != new
            && !is_given("lsm-profile")
        {
            flags.extend(["--lsm-profile".to_owned(), format!("{kind}:{new}")]);
        }
    };
    profile("apparmor", &recorded.apparmor, &now.apparmor);
    profile("selinux", &recorded.selinux, &now.selinux);
    if let (Some(old), Some(new)) = (&recorded.mount_label, &now.mount_label)
        && old != new
        && !is_given("lsm-mount-context")
    {
        flags.extend(["--lsm-mount-context".to_owned(), new.clone()]);
    }
    flags
}

fn active(host: &Host) -> Vec<&'static str> {
    let yes = |path: &str, value: &str| host.line(path).is_some_and(|t| t.starts_with(value));
    let mut found = Vec::new();
    if yes("/sys/module/apparmor/parameters/enabled", "Y") {
        found.push("AppArmor");
    }
    if yes("/sys/fs/selinux/enforce", "1") {
        found.push("SELinux");
    }
    found
}

/// Returns what a checkpoint's labels need and this host lacks. CRIU restores the processes under the recorded profile,
/// or under the new spec's where that names another.
pub fn warnings(host: &Host, recorded: &LsmFacts, now: &LsmFacts) -> Vec<String> {
    let mut warnings = Vec::new();
    let modules = active(host);
    let mut warn = |what: String| warnings.push(what);
    // crun and runc pass "unconfined" to the kernel for none.
    let confined = |name: &&String| name.as_str() != "unconfined";
    let profile = recorded.apparmor.as_ref().and(now.apparmor.as_ref());
    if let Some(name) = profile.or(recorded.apparmor.as_ref()).filter(confined) {
        let loaded = host.text("/sys/kernel/security/apparmor/profiles");
        // One profile a line, `NAME (enforce)`.
        let has = |text: &String| {
            let mut lines = text.lines();
            lines.any(|l| l.rsplit_once(" (").is_some_and(|(n, _)| n == name))
        };
        if !modules.contains(&"AppArmor") {
            warn(format!(
                "the container ran under the AppArmor profile {name}, and this host has no AppArmor: nothing confines the restored one"
            ));
        } else if loaded.as_ref().is_ok_and(|text| !has(text)) {
            warn(format!(
                "the container's AppArmor profile {name} is not loaded on this host, and the restore will fail on it; load it (apparmor_parser -r), or start the container with another (podman: --security-opt apparmor=NAME)"
            ));
        }
    }
    if let Some(label) = &recorded.selinux
        && !host.is_dir("/sys/fs/selinux")
    {
        warn(format!(
            "the container ran under the SELinux label {label}, and this host has no SELinux: nothing confines the restored one"
        ));
    }
    warnings
}

/// Returns a message if CRIU lacked a permission while a security module is active: root lacks none otherwise.
pub fn denial(host: &Host, log: &Path, labels: &LsmFacts) -> Option<String> {
    use std::io::Read;
    let modules = active(host);
    if modules.is_empty() {
        return None;
    }
    let mut text = Vec::new();
    let file = std::fs::File::open(log).ok()?;
    file.take(MAX_LOG).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().find(|l| {
        l.contains("Error (") && (l.contains("Permission denied") || l.contains("errno 13"))
    })?;
    let label = [
        ("AppArmor profile", &labels.apparmor),
        ("SELinux label", &labels.selinux),
    ]
    .into_iter()
    .find_map(|(kind, label)| Some(format!(" (the container's {kind} is {})", label.as_ref()?)))
    .unwrap_or_default();
    let what = line.find("Error (").and_then(|at| line.get(at..));
    Some(format!(
        "{} has denied something to CRIU or to the container: {}{label}; see the denial in the kernel's log (`journalctl -k | grep -i denied`) and allow it, or run the container without a profile (podman: --security-opt apparmor=unconfined, --security-opt label=disable)",
        modules.join(" or "),
        what.unwrap_or(line).trim(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use std::fs;

    fn labels(apparmor: &str) -> LsmFacts {
        LsmFacts {
            apparmor: Some(apparmor.into()),
            ..LsmFacts::default()
        }
    }

    #[test]
    fn another_profile_is_passed_on() {
        let none = |_: &str| false;
        assert!(flags(&labels("a"), &labels("a"), none).is_empty());
        assert!(flags(&LsmFacts::default(), &labels("a"), none).is_empty());
        assert_eq!(
            flags(&labels("a"), &labels("b"), none),
            ["--lsm-profile", "apparmor:b"]
        );
    }

    #[test]
    fn profiles_that_a_host_lacks() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let none = LsmFacts::default();
        let told = |recorded: &LsmFacts, now: &LsmFacts| warnings(&host, recorded, now).join("; ");
        assert_eq!(told(&none, &none), "");
        assert_eq!(told(&labels("unconfined"), &none), "");
        assert!(told(&labels("a"), &none).contains("profile a, and this host has no AppArmor"));
        dir.put("sys/module/apparmor/parameters/enabled", "Y\n");
        assert_eq!(told(&labels("a"), &none), "", "the list cannot be read");
        dir.put(
            "sys/kernel/security/apparmor/profiles",
            "containers default (enforce)\nb (complain)\n",
        );
        assert_eq!(told(&labels("containers default"), &none), "");
        assert!(told(&labels("a"), &none).contains("profile a is not loaded on this host"));
        assert_eq!(told(&labels("a"), &labels("b")), "", "the new one counts");
        let selinux = LsmFacts {
            selinux: Some("u:r:t".into()),
            ..LsmFacts::default()
        };
        assert!(told(&selinux, &none).contains("label u:r:t, and this host has no SELinux"));
    }

    #[test]
    fn a_denial_is_told_where_a_module_is_at_work() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        let line = "(00.05) 12: Error (criu/transport.c:3): transport socket: Permission denied\n";
        fs::write(&log, line).unwrap();
        let host = Host::at(dir.path());
        assert_eq!(denial(&host, &log, &labels("x")), None, "no module");
        let apparmor = dir.path().join("sys/module/apparmor/parameters");
        apparmor.put("enabled", "Y\n");
        let told = denial(&host, &log, &labels("containers-default")).unwrap();
        for word in [
            "AppArmor has denied",
            "transport socket: Permission denied",
            "profile is containers-default",
            "apparmor=unconfined",
        ] {
            assert!(told.contains(word), "{word}: {told}");
        }
        fs::write(&log, "(00.05) Error (criu/x.c:3): No such file\n").unwrap();
        assert_eq!(denial(&host, &log, &labels("x")), None);
    }
}
