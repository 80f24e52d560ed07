//! Runs `restore`: opens the metadata, chooses GPUs, checks, prepares images and bundle, restores.
//!
//! The steps hand data to each other and touch nothing of the user's until the last:
//!
//! 1. what was checkpointed ([`Metadata`]);
//! 2. what this host has, and which GPU takes which place ([`preflight`]);
//! 3. the image directory of this operation ([`images`]);
//! 4. the edits of the new container's spec ([`bundle`]).
//!
//! A directory without metadata is a checkpoint of a container without GPUs, or of another tool: the low-level runtime
//! restores it as it is. Two fixes apply to every restore under crun, GPU or not. cryopod drops a runc flag that
//! containerd passes to any runtime, and makes CRIU leave cgroups alone where it would fail on them.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use cryopod_archive::metadata::Metadata;
use cryopod_archive::{handover, names};
use cryopod_gpu_plan::amd::image::Images;
use cryopod_gpu_plan::plan::PlanError;
use cryopod_gpu_plan::switches::Switches;
use cryopod_host::destinations::Destinations;
use cryopod_host::files::Host;
use cryopod_host::mountinfo;
use cryopod_host::nodes::Vendor;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_host::spec::Spec;

use crate::argv::{self, Invocation};
use crate::bundle::{self, Edit};
use crate::bundle_render::OnlyRender;
use crate::checkpoint::exit_code;
use crate::child::{self, Ended, Watch};
use crate::choose::Chosen;
use crate::context::Context;
use crate::error::Error;
use crate::lowlevel::Kind;
use crate::operation::Operation;
use crate::preflight::{self, Means, Question};
use crate::reasons::Before;
use crate::runtime_log::RuntimeLog;
use crate::searchable::{self, Searchable};
use crate::setup::{self, Setup};
use crate::{
    compressed, cpuset, facts, images, log, loopback, lsm, passthrough, plugins, privileges,
    rootfs, store, surroundings, vram,
};
use cryopod_host::cgroups::{self, Cgroups};

/// How long the processes of a failed restore may take to exit.
const EXIT_LIMIT: Duration = Duration::from_secs(5);
/// Restores a container. Execs the low-level runtime for one whose checkpoint has no metadata.
///
/// # Errors
/// Nothing was started, and the checkpoint is untouched.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    let host = Host::system();
    let args = fit_arguments(ctx, inv, &host);
    // 1. What was checkpointed.
    let directory = image_directory(ctx, inv);
    handover::before_restore(&directory).map_err(|e| Error::Failed(e.to_string()))?;
    let stored = store::find(&ctx.config, inv, &directory)?;
    let Some(metadata) = Metadata::open(&directory)? else {
        if let Some(stored) = &stored {
            return Err(store::without_metadata(stored, &directory));
        }
        rootfs::apply(&ctx.config.rootfs, &directory, &bundle_directory(inv))?;
        return Err(passthrough::exec(&ctx.low, &args));
    };
    images::no_links(&directory)?;
    let _held = bundle::hold(&bundle_directory(inv), &inv.id)?;
    let tools = SystemTools::from_env();
    let spec = Spec::of_bundle(&bundle_directory(inv))?;
    let switches = Switches::gather(&spec, &ctx.config.checks, &|name| std::env::var(name).ok())
        .map_err(Error::Failed)?;
    let amd = match plugins::uses(&metadata, Vendor::Amd) {
        true => Images::collect(&directory).map_err(|e| Error::Failed(e.to_string()))?,
        false => Images::default(),
    };
    let criu = facts::criu(&tools, ctx.config.limits.tool());
    let signals = child::Signals::watch()?;
    let op = Operation::new()?;
    // 2. What this host has for it, which GPUs it gets, and whether all requirements hold.
    let mut means = Means::gather(
        &ctx.config,
        &host,
        &tools,
        criu.as_ref(),
        &metadata,
        Some(&op),
    );
    means
        .faults
        .extend(compressed::refusal(&directory, criu.as_ref()));
    let mut answer = preflight::answer(&Question {
        host: &host,
        config: &ctx.config,
        metadata: &metadata,
        spec: &spec,
        switches: &switches,
        low: ctx.low.kind,
        faults: &means.faults,
        agent: means.agent.as_ref().map(|a| &a.ready),
        amd: Some(&amd),
        freed: 0,
    })?;
    let chosen = answer.settled()?;
    // 3. Nothing prevents the restore.
    let Means { plugins, agent, .. } = means;
    let low_version = facts::version_line(&tools, &ctx.low.path, ctx.config.limits.tool());
    for warning in lsm::warnings(&host, &metadata.lsm, &surroundings::labels(&spec)) {
        tracing::warn!("{warning}");
    }
    let setup = Setup {
        ctx,
        inv,
        spec: &spec,
        tools: &tools,
        criu: &criu.ok_or_else(setup::no_criu)?,
        low_version: low_version.as_deref(),
        locked: &[],
    };
    let surroundings = surroundings::Bundle {
        spec: &spec,
        mounts: &Destinations::of(&host, &spec, &bundle_directory(inv)),
    };
    let mut provision =
        surroundings::restore(ctx, inv, &host, surroundings, &metadata, &chosen, &op)?;
    let given = privileges::Given {
        host: &host,
        spec: &spec,
        read_only: &provision.read_only,
        relabelled: provision.relabels(inv),
    };
    let beyond = privileges::settle(&ctx.config, &directory, given)?;
    if !beyond.is_empty() {
        return Err(PlanError::RestoreRefused(beyond).into());
    }
    let away = stored.as_ref().map_or(0, |found| found.reference.bytes());
    let data = facts::directory_bytes(&directory).saturating_add(away);
    provision.extra.limit_s = ctx.config.limits.restore(data).as_secs();
    if ctx.low.kind == Kind::Runc && loopback::own_network(&spec) {
        let file = op.file(loopback::FILE);
        let what = format!("{}: cannot be written", file.display());
        std::fs::write(file, "").map_err(Error::io(what))?;
    }
    // 4. The images, with the archived /dev rewritten for this host, and the files that are in a store.
    if let Some(stored) = &stored {
        store::verify(
            &ctx.config,
            &inv.id,
            stored,
            ctx.config.limits.restore(data),
        )?;
    }
    let overlay = images::overlay(&op, &directory, &chosen.remap, stored.as_ref())?;
    let args = line(ctx, inv, &host, &directory, overlay.as_deref())?;
    let nvidia = match agent {
        Some(agent) => Some((agent, chosen.driver_map()?)),
        None => None,
    };
    let vram = vram::restore(&ctx.config, &metadata, &directory)?;
    let mut ready = setup.restore(&op, &plugins, nvidia, vram, &provision.extra)?;
    ready.env.append(&mut answer.env);
    let mut args = provision.line(ctx, inv, args);
    let runtime_log = RuntimeLog::apart(&op, &ctx.low, inv, &mut args);
    let _searchable = Searchable::for_restore(&host, &spec, &directory)?;
    if ctx.low.kind == Kind::Crun {
        searchable::state_directory(&host, &spec, inv.globals.root.as_deref())?;
    }
    // 5. The bundle, last of all: from here on a failure puts it back.
    let edits = edits(ctx, &chosen, answer.amd_visible);
    let edited = bundle::edit(&host, &bundle_directory(inv), &spec, &edits)?;
    let cgroups = spec
        .cgroup(&inv.id)
        .map(|path| Cgroups::vacant(&host, path))
        .unwrap_or_default();
    rootfs::apply(&ctx.config.rootfs, &directory, &bundle_directory(inv))?;
    let mount_points = provision.mount_points(&bundle_directory(inv), surroundings)?;
    if ctx.low.kind == Kind::Crun {
        cpuset::prepare(&host, &spec)?;
    }
    let detach = inv.flags.has("detach");
    let watch = Watch {
        kind: child::Kind::Restore { detach },
        action_script: &ready.action_script,
        limit: ready.limit,
        abort_limit: Duration::from_secs(ctx.config.limits.abort_s),
        abort_file: op.file(setup::ABORT_FILE),
        images: None,
        agent: ready.agent.as_ref().and_then(crate::agent::Agent::pid),
    };
    let log = inv.work_path().join(names::RESTORE_LOG);
    let before = Before::note(log, &inv.globals);
    let ended = child::run(&ctx.low, &args, &ready.env, &watch, &signals, &mut |_| true)?;
    let failed = ended.code != 0;
    let said = runtime_log.as_ref().filter(|_| failed);
    let said = said.and_then(RuntimeLog::own_error);
    let denied = before
        .criu_log()
        .and_then(|log| lsm::denial(&host, log, &surroundings::labels(&spec)));
    let finished = ready.finish(&op);
    // The GPU restore comes after CRIU's last stage, and kills processes whose memory cannot be restored.
    let lost = ended.code != 0 && finished.error.is_some();
    let reasons = finished.reasons().chain(denied).chain(said).collect();
    // A container in the foreground ends with its own exit code, and leaves no process behind.
    let ran = ended.code == 0 || !detach && ended.passed && !lost;
    let left = ended.code != 0 && cgroups.kill();
    if ran && !left {
        edited.keep();
        mount_points.keep();
    } else {
        if ended.killed || ended.lost_processes || left {
            remove_remains(ctx, inv, &tools);
        }
        for (cgroup, error) in cgroups.remove(EXIT_LIMIT) {
            tracing::warn!("the cgroup {}: left behind: {error}", cgroup.display());
        }
        let stuck = ended.killed && plugins::uses(&metadata, Vendor::Amd);
        log::error(&explain(ctx, inv, &ended, reasons, &before, stuck));
    }
    if let Some(log) = runtime_log.filter(|_| !failed) {
        log.hand_on();
    }
    Ok(exit_code(ended.code))
}

/// Removes the remains of a container when the runtime, or CRIU late in its work, was killed in the middle: its state
/// would block the next try. Never called after a failure of the runtime's own: a container of this name may be running
/// already.
fn remove_remains(ctx: &Context, inv: &Invocation, tools: &dyn Tools) {
    let mut args: Vec<&OsStr> = Vec::new();
    if let Some(root) = &inv.globals.root {
        args.extend([OsStr::new("--root"), root.as_os_str()]);
    }
    args.extend([
        OsStr::new("delete"),
        OsStr::new("--force"),
        OsStr::new(&inv.id),
    ]);
    // runc mounts the root for CRIU in its own directory of the container, and cannot remove that while it is mounted.
    let root = inv.globals.root.as_deref();
    let directory = root.unwrap_or(Path::new("/run/runc")).join(&inv.id);
    mountinfo::unmount_below(&directory);
    // More than once, as files may still appear while the last processes end.
    for _ in 0..3 {
        match tools.output(&ctx.low.path, &args, ctx.config.limits.tool()) {
            Ok(out) if out.code == 0 => return,
            Ok(out) => tracing::debug!("delete --force: {}", out.stderr),
            Err(e) => tracing::debug!("delete --force: {e}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn edits<'a>(
    ctx: &'a Context,
    chosen: &'a Chosen,
    amd_visible: Option<Vec<u32>>,
) -> Vec<Box<dyn Edit + 'a>> {
    let mut edits: Vec<Box<dyn Edit + 'a>> = vec![
        Box::new(bundle::Devices {
            remap: &chosen.remap,
        }),
        Box::new(bundle::Hooks {
            drop: &ctx.config.hooks.drop,
        }),
    ];
    if let Some(visible) = amd_visible {
        edits.push(Box::new(OnlyRender { visible }));
    }
    edits
}

/// Builds the command line: the arguments that the low-level runtime takes, and the overlay if there is one.
fn line(
    ctx: &Context,
    inv: &Invocation,
    host: &Host,
    directory: &Path,
    overlay: Option<&Path>,
) -> Result<Vec<OsString>, Error> {
    let Some(overlay) = overlay else {
        return Ok(fit_arguments(ctx, inv, host));
    };
    let original = std::path::absolute(directory).map_err(Error::io(format!(
        "{}: cannot be found",
        directory.display()
    )))?;
    // Replaced first, while the indices of flags still match the original line.
    let args = images::with_image_path(&ctx.args, inv, overlay, &original);
    let ctx = Context {
        config: ctx.config.clone(),
        low: ctx.low.clone(),
        args,
    };
    match argv::decode(ctx.low.kind, &ctx.args) {
        Some(inv) => Ok(fit_arguments(&ctx, &inv, host)),
        None => Err(Error::Failed(
            "the command line cannot be understood with another image path".into(),
        )),
    }
}

/// Returns the image directory: crun takes a relative path below the bundle, runc below the working directory.
fn image_directory(ctx: &Context, inv: &Invocation) -> PathBuf {
    match ctx.low.kind {
        Kind::Crun => bundle_directory(inv).join(inv.image_path()),
        Kind::Runc => inv.image_path(),
    }
}

fn bundle_directory(inv: &Invocation) -> PathBuf {
    inv.flags
        .value("bundle")
        .filter(|p| !p.is_empty())
        .map_or_else(|| ".".into(), PathBuf::from)
}

/// Adapts the command line to the low-level runtime.
fn fit_arguments(ctx: &Context, inv: &Invocation, host: &Host) -> Vec<OsString> {
    if ctx.low.kind != Kind::Crun {
        return ctx.args.clone();
    }
    fit_crun(
        &ctx.args,
        inv,
        // On a hybrid host a CRIU started by crun fails to restore cgroups. It finds the controllers of version 1 in
        // the image and writes to files that the unified hierarchy of crun lacks (`cpuset.cpus: Permission denied`,
        // CRIU 4.1.1 and 4.2.1). crun sets up the container's cgroup itself.
        cgroups::setup(host) == cgroups::Setup::Hybrid,
    )
}

fn fit_crun(args: &[OsString], inv: &Invocation, ignore_cgroups: bool) -> Vec<OsString> {
    let dropped = inv.flags.place("no-subreaper");
    let mut line: Vec<OsString> = args
        .iter()
        .enumerate()
        .filter(|(i, _)| Some(*i) != dropped)
        .map(|(_, a)| a.clone())
        .collect();
    if ignore_cgroups && inv.flags.value("manage-cgroups-mode").is_none() {
        line = setup::with_flags(&line, inv.verb_at, &["--manage-cgroups-mode", "ignore"]);
    }
    line
}

fn explain(
    ctx: &Context,
    inv: &Invocation,
    ended: &Ended,
    reasons: Vec<String>,
    before: &Before,
    amd_stuck: bool,
) -> String {
    let why = facts::why(&ctx.low, ended, reasons, before);
    let stuck = match amd_stuck {
        true => format!(
            ", and CRIU had to be killed. Its {} was at work, whose search for GPUs does not end on some hosts: restore with fewer of its comparisons (dev.cryopod.check.KFD_NUMA_CHECK=off or another KFD_*_CHECK), on other GPUs (dev.cryopod.gpu.map), or, if it was copying GPU memory, with a higher limits.restore_s in {}",
            plugins::AMD_PLUGIN,
            crate::config::PATH
        ),
        false => String::new(),
    };
    format!(
        "restore of {} failed and the checkpoint is untouched: {why}{stuck}",
        inv.id
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::argv::decode;

    #[test]
    fn crun_gets_what_it_takes() {
        let fit = |line: &str, hybrid| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let inv = decode(Kind::Crun, &args).unwrap();
            fit_crun(&args, &inv, hybrid)
                .iter()
                .map(|a| a.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            fit("restore --detach -no-subreaper --bundle /b c1", false),
            "restore --detach --bundle /b c1"
        );
        assert_eq!(fit("--root /r restore c1", false), "--root /r restore c1");
        assert_eq!(
            fit("--root /r restore c1", true),
            "--root /r restore --manage-cgroups-mode ignore c1"
        );
        assert_eq!(
            fit("restore --manage-cgroups-mode soft c1", true),
            "restore --manage-cgroups-mode soft c1"
        );
    }
}
