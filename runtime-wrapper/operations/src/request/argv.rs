//! Decodes just enough of runc's and crun's command lines to know the verb and its arguments.
//!
//! Global flags are a closed set, decoded exactly, so that the first word after them is the verb: in `delete
//! checkpoint` the verb is `delete`. runc takes Go's flag syntax (`-flag`, `--flag`, `--flag=value`, `--flag value`),
//! crun GNU's (`--flag`, unique prefixes of it, `-b DIR`). A line that is not fully understood gives no [`Invocation`]:
//! the low-level runtime gets it unchanged and reports the error.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nix::sys::signal::Signal;

use crate::request::lowlevel::RuntimeKind;

/// A verb that cryopod handles itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Checkpoint,
    Restore,
    Create,
    Run,
    Start,
    State,
    Kill,
    Pause,
    Resume,
    Other,
}

/// The flags before the verb.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Globals {
    pub root: Option<PathBuf>,
    pub log: Option<PathBuf>,
    pub log_json: bool,
    pub systemd_cgroup: bool,
    pub debug: bool,
}

/// A command line, as far as it is understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invocation {
    pub globals: Globals,
    pub verb: Verb,
    pub verb_at: usize,
    /// Flags of `checkpoint`, `restore`, `create` and `run`; empty for other verbs.
    pub flags: Flags,
    /// The container's id; empty for [`Verb::Other`].
    pub id: String,
}

impl Invocation {
    /// Returns the signal that a `kill` with these arguments sends, if it is TERM or KILL. The low-level runtimes take names
    /// in any case, and send TERM if there is none.
    pub fn signal(&self, args: &[OsString]) -> Option<Signal> {
        let words = args.get(self.verb_at + 1..)?.iter();
        let words: Vec<_> = words.filter_map(|w| w.to_str()).collect();
        let mut words = words.into_iter().filter(|w| !w.starts_with('-'));
        let Some(signal) = words.nth(1) else {
            return Some(Signal::SIGTERM);
        };
        let name = signal.to_uppercase();
        match name.strip_prefix("SIG").unwrap_or(&name) {
            "15" | "TERM" => Some(Signal::SIGTERM),
            "9" | "KILL" => Some(Signal::SIGKILL),
            _ => None,
        }
    }

    /// Directory for a checkpoint's images: the flag, or the default of runc and crun.
    pub fn image_path(&self) -> PathBuf {
        self.flags
            .value("image-path")
            .filter(|p| !p.is_empty())
            .map_or_else(|| "checkpoint".into(), PathBuf::from)
    }

    /// The bundle of a restore, `create` or `run`: the flag, or the working directory.
    pub fn bundle(&self) -> PathBuf {
        self.flags
            .value("bundle")
            .filter(|p| !p.is_empty())
            .map_or_else(|| ".".into(), PathBuf::from)
    }

    /// The image directory of a restore: crun takes a relative path below the bundle, runc below the working directory.
    pub fn images_of_restore(&self, kind: RuntimeKind) -> PathBuf {
        match kind {
            RuntimeKind::Crun => self.bundle().join(self.image_path()),
            RuntimeKind::Runc => self.image_path(),
        }
    }

    /// Directory for CRIU's logs: the flag, or that of the images.
    pub fn work_path(&self) -> PathBuf {
        self.flags
            .value("work-path")
            .filter(|p| !p.is_empty())
            .map_or_else(|| self.image_path(), PathBuf::from)
    }
}

/// Flags of `checkpoint` and `restore`: name without dashes, value if it takes one, index among the arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags(Vec<(String, Option<OsString>, usize)>);

impl Flags {
    /// Returns true if the flag was given (and not as `--flag=false`).
    pub fn has(&self, name: &str) -> bool {
        self.0
            .iter()
            .rev()
            .find(|(n, ..)| n == name)
            .is_some_and(|(_, v, _)| v.as_ref().is_none_or(|v| v != "false"))
    }

    /// The flag's value; the last one counts.
    pub fn value(&self, name: &str) -> Option<&OsString> {
        self.0.iter().rev().find(|(n, ..)| n == name)?.1.as_ref()
    }

    /// Index of the flag's last occurrence among the arguments.
    pub fn last_place(&self, name: &str) -> Option<usize> {
        Some(self.0.iter().rev().find(|(n, ..)| n == name)?.2)
    }

    /// Index of the flag's first occurrence among the arguments.
    pub fn place(&self, name: &str) -> Option<usize> {
        Some(self.0.iter().find(|(n, ..)| n == name)?.2)
    }
}

/// A flag's name, and whether it takes a value.
type Flag = (&'static str, bool);

/// Returns a set's flags. `=` after a name: it takes a value.
fn each_flag(set: &'static str) -> impl Iterator<Item = Flag> {
    set.split_whitespace()
        .map(|word| match word.strip_suffix('=') {
            Some(name) => (name, true),
            None => (word, false),
        })
}

const RUNC_GLOBALS: &str = "debug log= log-format= root= criu= systemd-cgroup rootless=";
const CRUN_GLOBALS: &str = "\
    debug cgroup-manager= systemd-cgroup log= log-format= log-level= root= rootless=";
const RUNC_CHECKPOINT: &str = "\
    image-path= work-path= parent-path= leave-running tcp-established tcp-skip-in-flight link-remap ext-unix-sk \
    shell-job lazy-pages status-fd= page-server= file-locks pre-dump manage-cgroups-mode= empty-ns= auto-dedup";
const CRUN_CHECKPOINT: &str = "\
    image-path= work-path= leave-running tcp-established ext-unix-sk shell-job file-locks network-lock= \
    parent-path= pre-dump manage-cgroups-mode=";
const RUNC_RESTORE: &str = "\
    console-socket= image-path= work-path= tcp-established ext-unix-sk shell-job file-locks manage-cgroups-mode= \
    bundle= b= detach d pid-file= no-subreaper no-pivot empty-ns= auto-dedup lazy-pages lsm-profile= \
    lsm-mount-context= no-new-keyring";
// Engines made for runc pass flags that crun lacks; see `restore::arguments`.
const CRUN_RESTORE: &str = "\
    bundle= b= image-path= work-path= tcp-established tcp-close ext-unix-sk shell-job detach d pid-file= \
    console-socket= file-locks manage-cgroups-mode= network-lock= lsm-profile= lsm-mount-context= no-subreaper \
    no-pivot no-new-keyring";
// Also of `run`.
const CREATE: &str = "\
    bundle= b= config= f= console-socket= pidfd-socket= pid-file= no-pivot no-new-keyring no-subreaper \
    preserve-fds= detach d keep";
const KILL: &str = "all a";

/// Decodes a command line (without the program's name). Returns `None` if it is not fully understood, asks for help or
/// has no verb.
pub fn decode(kind: RuntimeKind, args: &[OsString]) -> Option<Invocation> {
    let globals_set = match kind {
        RuntimeKind::Crun => CRUN_GLOBALS,
        RuntimeKind::Runc => RUNC_GLOBALS,
    };
    let (flags, verb_at) = take_flags(kind, globals_set, args, 0)?;
    let verb = match args.get(verb_at)?.to_str() {
        Some("checkpoint") => Verb::Checkpoint,
        Some("restore") => Verb::Restore,
        Some("create") => Verb::Create,
        Some("run") => Verb::Run,
        Some("start") => Verb::Start,
        Some("state") => Verb::State,
        Some("kill") => Verb::Kill,
        Some("pause") => Verb::Pause,
        Some("resume") => Verb::Resume,
        _ => Verb::Other,
    };
    let globals = Globals {
        root: flags.value("root").map(PathBuf::from),
        log: flags.value("log").and_then(|log| log_file(kind, log)),
        log_json: flags.value("log-format").is_some_and(|f| f == "json"),
        systemd_cgroup: flags.has("systemd-cgroup")
            || flags
                .value("cgroup-manager")
                .is_some_and(|m| m == "systemd"),
        debug: flags.has("debug"),
    };
    let set = match (verb, kind) {
        (Verb::Pause | Verb::Resume | Verb::Start | Verb::State, _) => "",
        (Verb::Kill, _) => KILL,
        (Verb::Create | Verb::Run, _) => CREATE,
        (Verb::Other, _) => {
            return Some(Invocation {
                globals,
                verb,
                verb_at,
                flags: Flags::default(),
                id: String::new(),
            });
        }
        (Verb::Checkpoint, RuntimeKind::Runc) => RUNC_CHECKPOINT,
        (Verb::Checkpoint, RuntimeKind::Crun) => CRUN_CHECKPOINT,
        (Verb::Restore, RuntimeKind::Runc) => RUNC_RESTORE,
        (Verb::Restore, RuntimeKind::Crun) => CRUN_RESTORE,
    };
    let (flags, id_at) = take_flags(kind, set, args, verb_at + 1)?;
    let id = args.get(id_at)?.to_str()?.to_owned();
    // One container and nothing after it but a signal; the runtime reports everything else as an error.
    let rest = args.len() - id_at - 1;
    (rest == 0 || verb == Verb::Kill && rest == 1).then_some(())?;
    (!id.is_empty()).then_some(Invocation {
        globals,
        verb,
        verb_at,
        flags,
        id,
    })
}

/// Returns the file that a log is. crun has others, too: `[file:]PATH`, `journald:NAME`, `syslog:NAME`.
fn log_file(kind: RuntimeKind, log: &OsStr) -> Option<PathBuf> {
    let has = |prefix: &str| log.as_bytes().strip_prefix(prefix.as_bytes());
    let path = match kind {
        RuntimeKind::Runc => log.as_bytes(),
        RuntimeKind::Crun if has("journald:").or(has("syslog:")).is_some() => return None,
        RuntimeKind::Crun => has("file:").unwrap_or(log.as_bytes()),
    };
    (!path.is_empty()).then(|| OsStr::from_bytes(path).into())
}

/// Reads flags from `at` on. Returns them and the index of the first word that is not a flag.
fn take_flags(
    kind: RuntimeKind,
    set: &'static str,
    args: &[OsString],
    mut at: usize,
) -> Option<(Flags, usize)> {
    let mut flags = Flags::default();
    while let Some(arg) = args.get(at) {
        let text = arg.as_bytes();
        if text == b"--" {
            return Some((flags, at + 1));
        }
        if !text.starts_with(b"-") || text == b"-" {
            break;
        }
        // crun's short flags may have their value attached.
        if kind == RuntimeKind::Crun
            && let [b'-', flag, value @ ..] = text
            && !value.is_empty()
            && let Ok(short) = std::str::from_utf8(&[b'-', *flag])
            && let Some((name, true)) = lookup(kind, set, short)
        {
            let value = Some(OsStr::from_bytes(value).into());
            flags.0.push((name.to_owned(), value, at));
            at += 1;
            continue;
        }
        // A value may be a path of any bytes.
        let (word, inline) = match text.iter().position(|byte| *byte == b'=') {
            Some(end) => (
                &text[..end],
                Some(OsStr::from_bytes(&text[end + 1..]).into()),
            ),
            None => (text, None),
        };
        let (name, takes_value) = lookup(kind, set, std::str::from_utf8(word).ok()?)?;
        let place = at;
        at += 1;
        let value = match (takes_value, inline) {
            (true, Some(v)) => Some(v),
            (true, None) => {
                let v = args.get(at)?.clone();
                at += 1;
                Some(v)
            }
            // Go takes --flag=true; getopt refuses a value for a flag that takes none.
            (false, Some(v)) if kind == RuntimeKind::Runc && (v == "true" || v == "false") => {
                Some(v)
            }
            (false, Some(_)) => return None,
            (false, None) => None,
        };
        flags.0.push((name.to_owned(), value, place));
    }
    Some((flags, at))
}

fn lookup(kind: RuntimeKind, set: &'static str, word: &str) -> Option<Flag> {
    let exact = |name: &str| each_flag(set).find(|(n, _)| *n == name);
    // Records short flags under their long names.
    let canonical = |(n, v): Flag| match n {
        "b" => ("bundle", v),
        "f" => ("config", v),
        "d" => ("detach", v),
        other => (other, v),
    };
    match (word.strip_prefix("--"), kind) {
        (Some(name), RuntimeKind::Runc) => exact(name).map(canonical),
        (None, RuntimeKind::Runc) => exact(word.strip_prefix('-')?).map(canonical),
        (Some(name), RuntimeKind::Crun) => {
            if let Some(flag) = exact(name).filter(|(n, _)| n.len() > 1) {
                return Some(flag);
            }
            let mut starting = each_flag(set).filter(|(n, _)| n.len() > 1 && n.starts_with(name));
            let found = starting.next()?;
            starting.next().is_none().then_some(found)
        }
        (None, RuntimeKind::Crun) => {
            let name = word.strip_prefix('-')?;
            // containerd passes runc's single-dash spelling to any runtime.
            if name == "no-subreaper" {
                return exact(name);
            }
            exact(name).filter(|(n, _)| n.len() == 1).map(canonical)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn verb(kind: RuntimeKind, line: &str) -> Option<(Verb, usize)> {
        decode(kind, &words(line)).map(|i| (i.verb, i.verb_at))
    }

    #[test]
    fn crun_s_own_ways_of_writing() {
        let line = "--log=journald:c1 create -b/srv/b -f=c.json -no-subreaper c1";
        let inv = decode(RuntimeKind::Crun, &words(line)).unwrap();
        let value = |name| inv.flags.value(name).and_then(|v| v.to_str());
        assert_eq!(
            (inv.globals.log, value("bundle"), value("config")),
            (None, Some("/srv/b"), Some("=c.json"))
        );
        for (kind, log, want) in [
            (RuntimeKind::Crun, "file:/l", Some("/l")),
            (RuntimeKind::Crun, "/l", Some("/l")),
            (RuntimeKind::Crun, "syslog:c1", None),
            (RuntimeKind::Crun, "", None),
            (RuntimeKind::Runc, "file:/l", Some("file:/l")),
        ] {
            assert_eq!(log_file(kind, OsStr::new(log)), want.map(PathBuf::from));
        }
    }

    #[test]
    fn a_kill_sends_the_signal_after_the_container() {
        for (line, want) in [
            ("kill 9", Some(Signal::SIGTERM)),
            ("kill 9 HUP", None),
            ("kill c1 Kill", Some(Signal::SIGKILL)),
            ("--root /r kill --all c1 SIGKILL", Some(Signal::SIGKILL)),
            ("kill c1 15", Some(Signal::SIGTERM)),
        ] {
            let args = words(line);
            let inv = decode(RuntimeKind::Runc, &args).unwrap();
            assert_eq!(inv.signal(&args), want, "{line}");
        }
    }

    #[test]
    fn the_verb_is_the_first_word_after_the_global_flags() {
        for kind in [RuntimeKind::Runc, RuntimeKind::Crun] {
            for (line, want) in [
                ("state x", Some((Verb::State, 0))),
                ("kill c1 9", Some((Verb::Kill, 0))),
                ("kill --all c1 KILL", Some((Verb::Kill, 0))),
                ("kill c1 9 9", None),
                ("--root /r start c1", Some((Verb::Start, 2))),
                (
                    "create --pid-file /p --bundle /b c1",
                    Some((Verb::Create, 0)),
                ),
                ("run -b /b -d c1", Some((Verb::Run, 0))),
                ("delete checkpoint", Some((Verb::Other, 0))),
                ("--root /r pause c1", Some((Verb::Pause, 2))),
                ("resume c1", Some((Verb::Resume, 0))),
                ("pause", None),
                ("--root checkpoint delete restore", Some((Verb::Other, 2))),
                (
                    "--root=/r --debug checkpoint c1",
                    Some((Verb::Checkpoint, 2)),
                ),
                (
                    "--root /r --log /l --log-format json --systemd-cgroup checkpoint --image-path /i c1",
                    Some((Verb::Checkpoint, 7)),
                ),
                ("restore --bundle /b --detach c1", Some((Verb::Restore, 0))),
                ("restore -b /b -d c1", Some((Verb::Restore, 0))),
                ("-- checkpoint c1", Some((Verb::Checkpoint, 1))),
                ("checkpoint", None),
                ("checkpoint --help", None),
                ("checkpoint c1 extra", None),
                ("checkpoint --image-path", None),
                ("checkpoint --no-such c1", None),
                ("restore --lsm-mount-context", None),
                ("--no-such checkpoint c1", None),
                ("--version", None),
                ("", None),
            ] {
                assert_eq!(verb(kind, line), want, "{kind:?} {line}");
            }
        }
    }

    #[test]
    fn each_runtimes_own_syntax() {
        use RuntimeKind::{Crun, Runc};
        assert!(verb(Runc, "-root /r -debug=true checkpoint -leave-running c1").is_some());
        assert!(verb(Crun, "-root /r checkpoint c1").is_none());
        assert!(verb(Crun, "--syst --root /r checkpoint --leave c1").is_some());
        assert!(verb(Runc, "--syst checkpoint c1").is_none());
        assert!(verb(Crun, "--lo /x checkpoint c1").is_none(), "ambiguous");
        assert!(verb(Crun, "--debug=true checkpoint c1").is_none());
        assert!(verb(Crun, "restore --detach -no-subreaper --bundle /b c1").is_some());
        let inv = decode(Crun, &words("--cgroup-manager systemd restore -d -b /b c1")).unwrap();
        assert!(inv.globals.systemd_cgroup && inv.flags.has("detach"));
        assert_eq!(inv.flags.value("bundle").unwrap(), "/b");
        assert_eq!(inv.id, "c1");
        let inv = decode(
            Runc,
            &words("checkpoint --leave-running=false --image-path a --image-path b c1"),
        )
        .unwrap();
        assert!(!inv.flags.has("leave-running"));
        assert_eq!(inv.flags.value("image-path").unwrap(), "b");
        let bytes = |text: &[u8]| OsString::from(OsStr::from_bytes(text));
        let args = [&b"restore"[..], b"--bundle=/b=\xff", b"c1"].map(bytes);
        let inv = decode(Runc, &args).unwrap();
        assert_eq!(inv.flags.value("bundle").unwrap(), &bytes(b"/b=\xff"));
        let unknown = [&b"restore"[..], b"--\xff=b", b"c1"].map(bytes);
        assert!(decode(Runc, &unknown).is_none());
    }

    proptest! {
        #[test]
        fn never_panics_and_points_at_the_verb(args in proptest::collection::vec("(-{0,2}[a-z-]{0,12}(=[a-z]{0,3})?|checkpoint|restore|--root|/x)", 0..8), crun: bool) {
            let args: Vec<OsString> = args.into_iter().map(OsString::from).collect();
            let kind = if crun { RuntimeKind::Crun } else { RuntimeKind::Runc };
            if let Some(inv) = decode(kind, &args) {
                let word = args[inv.verb_at].to_str().unwrap();
                prop_assert_eq!(word == "checkpoint", inv.verb == Verb::Checkpoint);
                prop_assert_eq!(word == "restore", inv.verb == Verb::Restore);
            }
        }
    }
}
