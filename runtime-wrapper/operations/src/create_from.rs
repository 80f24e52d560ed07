//! Creates a container from a checkpoint: `create` of a container that names one becomes a restore.
//!
//! The container names the checkpoint by the annotation [`ANNOTATION`], or by the variable [`VARIABLE`] of its process
//! where the engine passes no annotations. Whoever makes a container writes both, an image can bring the variable, and
//! the runtime is root: only checkpoints that `restore.allow` gives this container's tenant are taken
//! ([`source`]).
//!
//! The engine's command line is rewritten as that of a restore. CRIU's hook gives the container its own host name and
//! freezes its cgroup before it runs an instruction; from then on it waits for its start ([`waiting`]). `run`
//! restores without the wait.

pub mod newest;
pub mod source;
pub mod waiting;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use cryopod_gpu_plan::ceiling::OtherGpus;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;
use serde_json::{Value, json};

use self::newest::Newest;
use self::source::SourceRequest;
use crate::bundle::{self, BundleUndo, Edit, avoid};
use crate::checkpoint::on_stop;
use crate::config::tenant::{Tenant, holds_pod};
use crate::config::{Config, CriuValue};
use crate::criu::opts::CriuOptions;
use crate::criu::program;
use crate::error::Error;
use crate::images::place::{self, setting};
use crate::images::store;
use crate::pause;
use crate::request::argv::{self, Invocation, Verb};
use crate::request::context::Context;
use crate::request::passthrough;
use crate::restore;
use crate::restore::new_container::NewContainer;
use crate::restore::new_container::hooks::NewHooks;
use crate::rootfs;
use crate::run::application::{self, Moment};
use crate::run::{metrics, operation};
use crate::vram::preload;

/// Names the checkpoint from which the container is created.
pub const ANNOTATION: &str = "dev.cryopod.restore";
/// Names the checkpoint in the process's environment, for engines that pass no annotations.
pub const VARIABLE: &str = "CRYOPOD_RESTORE";

/// What happens if the restore is refused or fails: `fail`, or `start` without the checkpoint.
const OTHERWISE: &str = "dev.cryopod.restore.otherwise";
/// Tells in the container's annotations why it started without its checkpoint.
const WITHOUT: &str = "dev.cryopod.restore.failed";
const TCP_ESTABLISHED: &str = "dev.cryopod.criu.tcp-established";

/// The annotations by which containerd and CRI-O tell the name of a container in its pod.
const IN_POD: [&str; 2] = [
    "io.kubernetes.cri.container-name",
    "io.kubernetes.container.name",
];
/// [`ANNOTATION`] for one container of a pod.
const FOR_ONE: &str = "dev.cryopod.restore.CONTAINER";

/// Annotations that count when the container is checkpointed, which may be days later. The last is the shim's.
const SWITCHES: [&str; 4] = [
    rootfs::ANNOTATION,
    store::ANNOTATION,
    pause::ANNOTATION,
    "dev.cryopod.checkpoint.exit",
];

/// The directory in the bundle for the logs of CRIU.
const LOGS: &str = "cryopod-restore";

/// Creates a container: from a checkpoint if it names one, else by the low-level runtime. Returns only if it did not
/// become the low-level runtime.
///
/// # Errors
/// The checkpoint may not be used or cannot be restored, an annotation cannot be followed, or the low-level runtime
/// cannot be started. No container is left, and the bundle is as it was.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    // A dead wrapper's note of a container must not outlive the next one of that name.
    operation::sweep_dead();
    let bundle = inv.bundle();
    // The low-level runtime reports a bundle that cannot be read.
    let mut edited = None;
    if let Ok(spec) = Spec::of_bundle(&bundle) {
        check_switches(&spec)?;
        application::check(&ctx.config, &spec)?;
        on_stop::check(ctx, inv, &spec)?;
        let mut edits: Vec<Box<dyn Edit>> = Vec::new();
        if let Some(named) = named(&spec) {
            let created = || create(ctx, inv, &spec, &named);
            let is_restored = |created: &Creation| matches!(created, Creation::Restored(code) if *code == ExitCode::SUCCESS);
            match metrics::measured("create", created, is_restored)? {
                Creation::Restored(code) => return Ok(code),
                Creation::WithoutCheckpoint(edit) => edits.push(Box::new(edit)),
            }
        }
        edited = Some(edit_new(&ctx.config, &bundle, &spec, edits)?);
    }
    let failed = passthrough::exec(&ctx.low, &ctx.args);
    drop(edited);
    Err(failed)
}

fn check_switches(spec: &Spec) -> Result<(), Error> {
    let mut said = SWITCHES.iter().map(|key| spec.switch(key).map(drop));
    said.try_for_each(|said| said.map_err(Error::not_started))?;
    CriuOptions::check_annotations(spec).map_err(|e| Error::not_started(e.to_string()))
}

/// Edits the bundle of a new container as its annotations ask for it, with one write. Dropped, the old text comes back.
fn edit_new(
    config: &Config,
    bundle: &Path,
    spec: &Spec,
    mut edits: Vec<Box<dyn Edit>>,
) -> Result<BundleUndo, Error> {
    edits.extend(avoid::edit(spec)?);
    edits.extend(preload::edits(config, bundle, spec)?);
    bundle::edit(&Host::system(), bundle, spec, &edits, None)
}

/// What became of a container that names a checkpoint.
enum Creation {
    Restored(ExitCode),
    WithoutCheckpoint(StartReason),
}

fn create(
    ctx: &Context,
    inv: &Invocation,
    spec: &Spec,
    named: &CheckpointName<'_>,
) -> Result<Creation, Error> {
    let start_without = match setting(spec, OTHERWISE).map(|set| set.value) {
        None | Some("fail") => false,
        Some("start") => true,
        Some(other) => {
            return Err(Error::not_started(format!(
                "{OTHERWISE}: {other:?} is neither \"fail\" nor \"start\""
            )));
        }
    };
    program::prefer_over_host(&ctx.config);
    let newest = named.checkpoint.strip_prefix(place::NEWEST);
    let newest = newest.map(|place| Newest::of(ctx, inv, spec, named, place));
    let newest = newest.transpose()?;
    // A restore may take longer than the lease counts.
    let renewal = newest.as_ref().map(|newest| {
        let noted = newest.note(&inv.id);
        noted.inspect_err(|_| newest.give_back(&inv.id))
    });
    let renewal = renewal.transpose()?.flatten();
    let restored = match &newest {
        None => restored(ctx, inv, spec, named),
        Some(newest) => newest.restore(&ctx.config, named.by, |named| {
            restored(ctx, inv, spec, named)
        }),
    };
    // The end of a stuck restore is the end of all processes below this one.
    let ended = renewal.is_some_and(|mut child| !matches!(child.try_wait(), Ok(None)));
    if let (Some(newest), true) = (&newest, ended)
        && let Err(e) = newest.note(&inv.id)
    {
        tracing::warn!("{e}");
    }
    match restored {
        Err(e) if start_without && !newest.as_ref().is_some_and(Newest::is_unknown) => {
            let why = e.to_string();
            tracing::warn!("{} starts without its checkpoint: {why}", inv.id);
            if let Some(newest) = &newest
                && let Err(e) = newest.keep()
            {
                newest.give_back(&inv.id);
                return Err(e);
            }
            Ok(Creation::WithoutCheckpoint(StartReason { why }))
        }
        Err(e) => {
            if let Some(newest) = newest {
                newest.give_back(&inv.id);
            }
            Err(e)
        }
        Ok(code) => {
            // In the foreground the container has ended, and nobody deletes it.
            if let (Some(newest), Verb::Run, false) = (newest, inv.verb, inv.flags.has("detach")) {
                newest.give_back(&inv.id);
            }
            Ok(Creation::Restored(code))
        }
    }
}

/// Tells in the container's annotations, which `state` shows, why it started without its checkpoint.
struct StartReason {
    why: String,
}

impl Edit for StartReason {
    fn name(&self) -> &'static str {
        "the reason why it starts without its checkpoint"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        if let Some(spec) = spec.as_object_mut() {
            let annotations = spec.entry("annotations").or_insert_with(|| json!({}));
            if let Some(annotations) = annotations.as_object_mut() {
                annotations.insert(WITHOUT.into(), json!(self.why));
            }
        }
        Ok(())
    }
}

fn restored(
    ctx: &Context,
    inv: &Invocation,
    spec: &Spec,
    named: &CheckpointName<'_>,
) -> Result<ExitCode, Error> {
    ensure_possible(inv)?;
    let CheckpointName {
        checkpoint,
        by,
        is_in_place,
    } = named;
    let wish = SourceRequest {
        checkpoint,
        is_in_place: *is_in_place,
        by_variable: *by == VARIABLE,
        tenant: &Tenant::of(&inv.id, &inv.bundle(), inv.globals.root.as_deref(), spec),
    };
    // The reason first: an event of Kubernetes shows the beginning.
    let images = source::find(&ctx.config, wish)
        .map_err(|why| Error::not_started(format!("{by}: {why} (the checkpoint {checkpoint})")))?;
    let restoring = Context {
        config: config_of_copy(&ctx.config, spec),
        low: ctx.low.clone(),
        args: restore_line(ctx, inv, images.directory())?,
    };
    let inv_of_restore = argv::decode(restoring.low.kind, &restoring.args).ok_or_else(|| {
        Error::Failed("the restore's command line cannot be understood".to_owned())
    })?;
    let wait = inv.verb == Verb::Create;
    let hooks = NewHooks::of(ctx, &inv.id, inv.bundle(), spec)?;
    let new = NewContainer::of(spec, wait, hooks);
    let (code, _guarded) = restore::run_new(&restoring, &inv_of_restore, &new)?;
    if wait {
        waiting::begin(&restoring, &inv_of_restore)?;
    } else if inv.flags.has("detach") {
        application::notify(ctx, inv, spec, Moment::AfterRestore);
    }
    Ok(code)
}

fn config_of_copy(config: &Config, spec: &Spec) -> Config {
    let mut config = config.clone();
    if config.gpu.allow_others == OtherGpus::Auto {
        // The spec is the new container's and not the archive's, also under podman.
        config.gpu.allow_others = OtherGpus::Never;
    }
    // A copy has no peers, and what the checkpoint's connections led to may still talk to another copy.
    let options = &mut config.criu.options;
    let configured = options.get("tcp-established") == Some(&CriuValue::Flag(true));
    // The restore refuses another word.
    let kept = spec.switch(TCP_ESTABLISHED).unwrap_or(None);
    if !kept.unwrap_or(configured) {
        let close = options.entry("tcp-close".into());
        close.or_insert(CriuValue::Flag(true));
    }
    config
}

#[derive(Debug, PartialEq, Eq)]
pub struct CheckpointName<'a> {
    checkpoint: &'a str,
    /// [`ANNOTATION`], [`FOR_ONE`] or [`VARIABLE`].
    by: &'static str,
    /// It was found in a place that the container may use.
    is_in_place: bool,
}

/// Returns the checkpoint that the container names. An annotation takes precedence, and of a pod's annotations that for
/// this container. They are for the pod's containers, and not for the one that only holds its namespaces.
fn named(spec: &Spec) -> Option<CheckpointName<'_>> {
    let own = for_one(spec).map(|checkpoint| (checkpoint, FOR_ONE));
    let annotation = own.or_else(|| Some((spec.annotation(ANNOTATION)?, ANNOTATION)));
    let (checkpoint, by) = match annotation.filter(|_| !holds_pod(spec)) {
        Some(annotation) => annotation,
        None => (spec.variable(VARIABLE)?, VARIABLE),
    };
    (!checkpoint.is_empty()).then_some(CheckpointName {
        checkpoint,
        by,
        is_in_place: false,
    })
}

/// The pod's annotation with the name of this container.
fn for_one(spec: &Spec) -> Option<&str> {
    let name = IN_POD.iter().find_map(|key| spec.annotation(key))?;
    let key = format!("{ANNOTATION}.{name}");
    let reserved = [OTHERWISE, WITHOUT].contains(&key.as_str());
    spec.annotation(&key).filter(|_| !reserved)
}

/// Options of `create` and `run` that a restore cannot carry out.
const NOT_OF_A_RESTORE: [&str; 4] = ["config", "keep", "pidfd-socket", "preserve-fds"];

/// # Errors
/// The command line asks for what a restore cannot do.
fn ensure_possible(inv: &Invocation) -> Result<(), Error> {
    let asked = |name: &&&str| {
        inv.flags.has(name) && inv.flags.value(name).is_none_or(|value| value != "0")
    };
    match NOT_OF_A_RESTORE.iter().find(asked) {
        None => Ok(()),
        Some(name) => Err(Error::not_started(format!(
            "a container cannot be created from a checkpoint with --{name}: leave it out"
        ))),
    }
}

/// Rewrites the command line of `create` or `run` as that of a restore.
fn restore_line(ctx: &Context, inv: &Invocation, images: &Path) -> Result<Vec<OsString>, Error> {
    let bundle = inv.bundle();
    let bundle = std::path::absolute(&bundle).map_err(Error::at(&bundle, "cannot be found"))?;
    let logs = bundle.join(LOGS);
    std::fs::create_dir_all(&logs).map_err(Error::at(&logs, "cannot be made"))?;
    let mut line: Vec<OsString> = ctx.args.iter().take(inv.verb_at).cloned().collect();
    line.push("restore".into());
    let mut flag =
        |name: &str, value: &OsString| line.extend([format!("--{name}").into(), value.clone()]);
    flag("bundle", &bundle.into());
    flag("image-path", &images.into());
    flag("work-path", &logs.into());
    for name in ["pid-file", "console-socket"] {
        if let Some(value) = inv.flags.value(name) {
            flag(name, value);
        }
    }
    if inv.verb == Verb::Create || inv.flags.has("detach") {
        line.push("--detach".into());
    }
    line.push(inv.id.clone().into());
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_containers_edits_are_written_together_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let text = |preload| {
            let annotations = json!({avoid::ANNOTATION: "io_uring", preload::ANNOTATION: preload});
            json!({"annotations": annotations, "process": {"env": []}}).to_string()
        };
        let edit = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let spec = Spec::of_bundle(dir.path()).unwrap();
            let edits = vec![Box::new(StartReason { why: "gone".into() }) as Box<dyn Edit>];
            edit_new(&Config::default(), dir.path(), &spec, edits)
        };
        let now = || std::fs::read_to_string(&path).unwrap();
        let refused = text("maybe");
        let error = edit(&refused).unwrap_err().to_string();
        assert!(error.contains("neither \"on\" nor \"off\""), "{error}");
        assert_eq!(now(), refused, "nothing of the edits before is left");
        let taken = text("off");
        let edited = edit(&taken).unwrap();
        assert!(now().contains("UV_USE_IO_URING=0") && now().contains(WITHOUT));
        drop(edited);
        assert_eq!(now(), taken, "the low-level runtime could not be started");
    }

    #[test]
    fn a_copy_closes_the_connections_unless_it_is_to_keep_them() {
        let closes = |annotation: Option<&str>, configured: Option<bool>| {
            let annotations = annotation.map(|word| json!({TCP_ESTABLISHED: word}));
            let spec = Spec::from_json(json!({"annotations": annotations}));
            let mut config = Config::default();
            let options = &mut config.criu.options;
            options.extend(configured.map(|on| ("tcp-established".into(), CriuValue::Flag(on))));
            config_of_copy(&config, &spec)
                .criu
                .options
                .contains_key("tcp-close")
        };
        for (annotation, configured, closed) in [
            (None, None, true),
            (Some("true"), None, false),
            (Some("false"), None, true),
            (Some("false"), Some(true), true),
            (Some("true"), Some(false), false),
            (None, Some(true), false),
            (None, Some(false), true),
        ] {
            assert_eq!(
                closes(annotation, configured),
                closed,
                "{annotation:?} {configured:?}"
            );
        }
    }

    #[test]
    fn a_word_that_nobody_understands_is_told_before_the_container_runs() {
        let with = |key: &str, word| Spec::from_json(json!({"annotations": {key: word}}));
        for key in SWITCHES {
            for word in ["on", "off", " true "] {
                check_switches(&with(key, word)).unwrap();
            }
            let said = check_switches(&with(key, "yes")).unwrap_err().to_string();
            assert!(
                said.contains(key) && said.ends_with("Nothing was started"),
                "{said}"
            );
        }
    }

    #[test]
    fn the_annotation_comes_before_the_variable() {
        let spec = |annotation: Option<&str>, env: &[&str]| {
            let annotations = annotation.map(|a| json!({ANNOTATION: a}));
            Spec::from_json(json!({"annotations": annotations, "process": {"env": env}}))
        };
        for (annotation, env, want) in [
            (
                Some("/a"),
                &["CRYOPOD_RESTORE=/b"][..],
                Some(("/a", ANNOTATION)),
            ),
            (
                None,
                &["A=1", "CRYOPOD_RESTORE=/b=c"],
                Some(("/b=c", VARIABLE)),
            ),
            (None, &["CRYOPOD_RESTORES=/b", "CRYOPOD_RESTORE="], None),
            (Some(""), &["CRYOPOD_RESTORE=/b"], None),
            (None, &[], None),
        ] {
            assert_eq!(
                named(&spec(annotation, env)).map(|n| (n.checkpoint, n.by)),
                want,
                "{annotation:?} {env:?}"
            );
        }
        let one = |name: &str| {
            let all = json!({ANNOTATION: "/a", "dev.cryopod.restore.one": "/1", OTHERWISE: "start", IN_POD[0]: name});
            let spec = Spec::from_json(json!({"annotations": all}));
            let named = named(&spec).unwrap();
            (named.checkpoint.to_owned(), named.by)
        };
        assert_eq!(one("one"), ("/1".into(), FOR_ONE));
        assert_eq!(one("two"), ("/a".into(), ANNOTATION));
        assert_eq!(one("otherwise"), ("/a".into(), ANNOTATION));
        let holds_pod = json!({ANNOTATION: "/a", "io.kubernetes.cri.container-type": "sandbox"});
        assert_eq!(
            named(&Spec::from_json(json!({"annotations": holds_pod}))),
            None
        );
    }
}
