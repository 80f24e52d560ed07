//! Checks the values of CRIU options.
//!
//! CRIU makes two words of a line of its configuration and gives all words to getopt (`parse_statement`, config.c). So an
//! option without its value takes the next line for one, and a value of an option that has none is ignored.

use cryopod_host::spec::switch;

use super::CriuValue;

/// Options that have no value. Most can also be switched off, as `no-NAME`.
const SWITCHES: &str = "all allow-uprobes auto-dedup daemon deprecated display-stats enable-external-masters \
    enable-external-sharing evasive-devices experimental ext-unix-sk extra file-locks force-irmap \
    ghost-fiemap lazy-pages leave-running leave-stopped link-remap log-pid mntns-compat-mode page-server \
    restore-detached restore-sibling shell-job skip-file-rwx-check skip-in-flight stream tcp-close \
    tcp-established tls track-mem unprivileged weak-sysctls";

/// Options that must have a value, of any text.
const TEXTS: &str = "address cgroup-dump-controller cgroup-props cgroup-props-file cgroup-root cgroup-yard close config \
    empty-ns enable-fs ext-mount-map external feature file-validation freeze-cgroup images-dir \
    inherit-fd irmap-scan-path join-ns log-file lsm-mount-context lsm-profile pidfile port pre-dump-mode \
    prev-images-dir ps-socket root skip-mnt status-fd tls-cacert tls-cacrl tls-cert tls-key tree veth-pair work-dir";

/// The way in which CRIU blocks the network during a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lock {
    Iptables,
    Nftables,
    Skip,
}

impl Lock {
    /// CRIU's word for it, as in the option `network-lock`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
            Self::Skip => "skip",
        }
    }

    /// Parses the value of `network-lock`.
    pub fn of(word: &str) -> Option<Self> {
        let all = [Self::Iptables, Self::Nftables, Self::Skip];
        all.into_iter().find(|l| l.word() == word)
    }
}

/// Returns the value of an option as CRIU takes it. Those of options that are not known here need only be one word.
///
/// # Errors
/// What the option takes.
pub fn checked(name: &str, value: &CriuValue) -> Result<CriuValue, String> {
    let word = match value {
        CriuValue::Flag(on) => Some(on.to_string()),
        CriuValue::Number(number) => Some(number.to_string()),
        CriuValue::Text(text) => Some(text.clone()),
        CriuValue::List(_) => None,
    };
    let is_switch = has(SWITCHES, name.strip_prefix("no-").unwrap_or(name));
    let (taken, form) = match name {
        _ if is_switch || name == "tls-no-cn-verify" => {
            // CRIU ignores the value of an option that is there.
            let on = |word| switch(word).or(["1", "yes"].contains(&word).then_some(true));
            let on = word.as_deref().and_then(on);
            (on.map(CriuValue::Flag), "true nor false")
        }
        "timeout" => {
            let seconds = word.as_deref().and_then(number);
            let seconds = seconds.filter(|s| i32::try_from(*s).is_ok());
            (seconds.map(|_| value.clone()), "a number of seconds")
        }
        "ghost-limit" => {
            let bytes = word.as_deref().and_then(size);
            let form = "a number of bytes, nor one with K, M or G";
            (bytes.map(|_| value.clone()), form)
        }
        "network-lock" => {
            let lock = word.as_deref().and_then(Lock::of);
            (lock.map(|_| value.clone()), "iptables, nftables nor skip")
        }
        _ => {
            let needs_text = has(TEXTS, name) && matches!(value, CriuValue::Flag(_));
            let is_one_word = match value {
                CriuValue::Text(text) => is_one_word(text),
                CriuValue::List(texts) => texts.iter().all(|text| is_one_word(text)),
                CriuValue::Flag(_) | CriuValue::Number(_) => true,
            };
            let taken = !needs_text && is_one_word;
            let form =
                "a text without blanks, `#` and `\"`, which CRIU's configuration cannot have";
            (taken.then(|| value.clone()), form)
        }
    };
    let shown = || match value {
        CriuValue::List(texts) => format!("{texts:?}"),
        _ => format!("{:?}", word.as_deref().unwrap_or_default()),
    };
    let negated = if form.contains(" nor ") {
        "neither"
    } else {
        "not"
    };
    taken.ok_or_else(|| format!("{} is {negated} {form}", shown()))
}

fn has(names: &str, name: &str) -> bool {
    names.split_whitespace().any(|n| n == name)
}

/// CRIU cuts a value at `#`, and even in quotes takes a blank for the next word.
fn is_one_word(text: &str) -> bool {
    !text.is_empty()
        && !text.contains(|c: char| c.is_whitespace() || c.is_control() || "#\"".contains(c))
}

fn number(digits: &str) -> Option<u64> {
    let all_digits = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| all_digits)
}

/// Parses a size as CRIU has it: bytes, or K, M, G, as in `2G` and `2GiB`.
pub fn size(text: &str) -> Option<u64> {
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let shift = match unit.trim_start_matches(['K', 'M', 'G']) {
        "" | "B" | "iB" => match unit.bytes().next() {
            None => 0,
            Some(b'K') => 10,
            Some(b'M') => 20,
            Some(b'G') => 30,
            Some(_) => return None,
        },
        _ => return None,
    };
    number(text.strip_suffix(unit)?)?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> CriuValue {
        CriuValue::Text(text.into())
    }

    #[test]
    fn each_option_takes_its_own_values() {
        let list = |texts: &[&str]| CriuValue::List(texts.iter().map(|t| (*t).into()).collect());
        for (name, value) in [
            ("timeout", text("60")),
            ("timeout", CriuValue::Number(60)),
            ("ghost-limit", text("0")),
            ("ghost-limit", text("300M")),
            ("ghost-limit", text("1GB")),
            ("ghost-limit", text("512KiB")),
            ("network-lock", text("skip")),
            ("external", list(&["mnt[/a]:b", "net[1]:c"])),
            ("lsm-profile", text("selinux:x")),
            ("link-remap", CriuValue::Flag(false)),
            ("no-link-remap", CriuValue::Flag(true)),
            ("cpu-cap", CriuValue::Flag(true)),
            ("of-a-later-criu", text("a=b")),
        ] {
            assert_eq!(checked(name, &value), Ok(value), "{name}");
        }
        for (word, on) in [
            ("on", true),
            ("1", true),
            ("yes", true),
            ("off", false),
            ("true", true),
            ("false", false),
        ] {
            assert_eq!(checked("tcp-close", &text(word)), Ok(CriuValue::Flag(on)));
        }
        for (name, value) in [
            ("tcp-close", text("no")),
            ("tcp-close", text("0")),
            ("tcp-close", text("False")),
            ("tcp-close", CriuValue::Number(0)),
            ("tcp-close", list(&["true"])),
            ("no-tcp-close", text("x")),
            ("timeout", CriuValue::Flag(true)),
            ("timeout", text("false")),
            ("timeout", text("60s")),
            ("timeout", text("+6")),
            ("timeout", CriuValue::Number(-1)),
            ("timeout", CriuValue::Number(1 << 31)),
            ("ghost-limit", text("8g")),
            ("ghost-limit", text("1.5G")),
            ("ghost-limit", text("1GX")),
            ("ghost-limit", text("1B")),
            ("ghost-limit", text("G")),
            ("ghost-limit", text("")),
            ("ghost-limit", text("99999999999G")),
            ("ghost-limit", CriuValue::Number(-1)),
            ("ghost-limit", CriuValue::Flag(true)),
            ("network-lock", text("true")),
            ("network-lock", text("nft")),
            ("external", CriuValue::Flag(true)),
            ("external", text("mnt[/a b]:c")),
            ("external", list(&["a", "b#c"])),
            ("skip-mnt", text("/a\nlibdir /x")),
            ("of-a-later-criu", text("a b")),
        ] {
            let said = checked(name, &value);
            assert!(said.is_err(), "{name} {value:?}");
        }
        assert_eq!(
            checked("ghost-limit", &text("8g")).unwrap_err(),
            "\"8g\" is neither a number of bytes, nor one with K, M or G"
        );
    }
}
