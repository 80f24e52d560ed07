//! `cryopod check ARCHIVE`: reports whether this checkpoint would restore here. Runs the checks of a restore on every
//! kind that [`Source`] reads; unpacks and changes nothing.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Error, anyhow, bail};
use cryopod_amd::image::{self as amd_image, Images};
use cryopod_archive::container::carried::IMAGE;
use cryopod_archive::container::engine as engine_records;
use cryopod_archive::container::file_sizes;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::format::names;
use cryopod_archive::format::text::printable;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::source::Source;
use cryopod_archive::store::{self, Reference};
use cryopod_gpu_plan::checks::compat::{Check, Verdict};
use cryopod_gpu_plan::checks::switches::{self, Switches};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::programs::SystemTools;
use cryopod_host::spec::Spec;
use cryopod_operations::config::Config;
use cryopod_operations::criu;
use cryopod_operations::criu::compressed;
use cryopod_operations::criu::plugins;
use cryopod_operations::criu::program;
use cryopod_operations::preflight::{self, RestoreAnswer, RestoreQuestion, RestoreTools};
use cryopod_operations::request::lowlevel::{LowLevel, RuntimeKind};
use cryopod_operations::run::operation::Operation;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::engine;
use crate::archives::confined::{Decoding, identities};
use crate::engines::engine::Engine;

/// containerd's record of a container, as [`Source`] names it.
const CONTAINERD_RECORD: &str = "containerd/checkpoint.config.v1+proto";
/// Exit code for a question that makes no sense.
const UNUSABLE: u8 = 2;

pub struct ArchiveQuestion<'a> {
    pub path: &'a Path,
    /// The name of the image, if a layout holds several.
    pub image: Option<&'a str>,
    /// The GPU map, instead of those of annotation and configuration.
    pub map: Option<&'a str>,
    /// Disabled checks.
    pub off: &'a [String],
    /// The engine for the restore, instead of the one that made the checkpoint.
    pub engine: Option<Engine>,
    /// The restore will use podman's `--ignore-volumes`.
    pub ignore_volumes: bool,
    pub json: bool,
}

/// The parts of a checkpoint that the checks need.
struct Checkpoint {
    kind: String,
    metadata: Option<Metadata>,
    spec: Spec,
    amd: Images,
    /// The image of the NVIDIA plugin.
    nvidia: Option<Vec<u8>>,
    /// `inventory.img`; empty if there is none.
    inventory: Vec<u8>,
    reference: Option<Reference>,
    records: engine::Records,
    grown: Vec<String>,
}

#[derive(Serialize)]
struct ArchiveReport<'a> {
    ok: bool,
    path: &'a Path,
    kind: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<&'a str>,
    checks: &'a [Check],
    refusals: Vec<RefusalReason<'a>>,
    map: Vec<GpuMove<'a>>,
}

#[derive(Serialize)]
struct RefusalReason<'a> {
    what: &'a str,
    remedy: &'a str,
}

#[derive(Serialize)]
struct GpuMove<'a> {
    from: &'a str,
    to: &'a str,
    why: &'a str,
}

/// Runs `cryopod check ARCHIVE`, and returns its exit code.
pub fn run(ask: &ArchiveQuestion<'_>) -> anyhow::Result<ExitCode> {
    match answer(ask) {
        Ok((checkpoint, answer)) => report(ask, &checkpoint, &answer),
        Err(why) => {
            eprintln!("cryopod: {}", printable(&crate::one_line(&why)));
            Ok(ExitCode::from(UNUSABLE))
        }
    }
}

fn answer(ask: &ArchiveQuestion<'_>) -> anyhow::Result<(Checkpoint, RestoreAnswer)> {
    if let Some(name) = ask.off.iter().find(|name| !switches::known(name)) {
        bail!(
            "--off {name}: no such check; there are {}",
            switches::names()
        );
    }
    let mut config = Config::load()?;
    program::prefer_over_host(&config);
    let mut checkpoint = open(ask)?;
    if let Some(map) = ask.map {
        map.parse::<cryopod_gpu_plan::mapping::gpumap::Wish>()
            .map_err(|e| anyhow!("--map: {e}"))?;
        config.gpu.map = Some(map.to_owned());
        checkpoint.spec = checkpoint
            .spec
            .without_annotation(cryopod_gpu_plan::mapping::gpumap::ANNOTATION);
    }
    let host = Host::system();
    let tools = SystemTools::from_env();
    let missing = engine::missing(&engine::EngineQuestion {
        host: &host,
        tools: &tools,
        engine: ask.engine,
        ignore_volumes: ask.ignore_volumes,
        records: &checkpoint.records,
        spec: &checkpoint.spec,
        metadata: checkpoint.metadata.as_ref(),
    });
    let Some(metadata) = &checkpoint.metadata else {
        let answer = RestoreAnswer {
            other: missing,
            ..RestoreAnswer::default()
        };
        return Ok((checkpoint, answer));
    };
    let switches = Switches::gather(&checkpoint.spec, &config.checks, &|name| {
        std::env::var(name).ok()
    })
    .map_err(Error::msg)?
    .without(ask.off);
    let criu = criu::find(&tools, config.limits.tool());
    let nvidia = plugins::uses(metadata, Vendor::Nvidia);
    // The driver agent needs a directory for its socket. Without one (not root) the driver is not asked.
    let op = match nvidia.then(Operation::new) {
        Some(Ok(op)) => Some(op),
        Some(Err(e)) => {
            eprintln!("cryopod: the NVIDIA driver is not asked: {e}");
            None
        }
        None => None,
    };
    let means = RestoreTools::gather(&config, &host, &tools, criu.as_ref(), metadata, op.as_ref());
    let mut answer = preflight::answer(&RestoreQuestion {
        host: &host,
        config: &config,
        metadata,
        spec: &checkpoint.spec,
        switches: &switches,
        low: LowLevel::find(&config).map_or(RuntimeKind::Runc, |low| low.kind),
        faults: &means.faults,
        agent: means.agent.as_ref().map(|a| &a.ready),
        amd: Some(&checkpoint.amd),
        nvidia: checkpoint.nvidia.as_deref(),
        freed: 0,
    })?;
    let compressed = compressed::of_inventory(&checkpoint.inventory, criu.as_ref());
    answer.other.extend(compressed);
    answer.other.extend(away(ask, &config, &checkpoint));
    answer.other.extend(missing);
    answer.other.extend(
        checkpoint
            .grown
            .iter()
            .map(|what| Refusal::new(what.clone(), "the checkpoint itself is untouched")),
    );
    Ok((checkpoint, answer))
}

/// Refuses if large files are in a store that is not here.
fn away(ask: &ArchiveQuestion<'_>, config: &Config, checkpoint: &Checkpoint) -> Option<Refusal> {
    let reference = checkpoint.reference.clone()?;
    let path = ask.path.join(names::STORE_REFERENCE);
    let error = store::find_in(reference, &path, &config.store.directories()).err()?;
    Some(Refusal::new(
        error.to_string(),
        "the checkpoint itself is untouched",
    ))
}

fn open(ask: &ArchiveQuestion<'_>) -> anyhow::Result<Checkpoint> {
    let limits = Limits {
        small_file_bytes: 256 << 20,
        small_total_bytes: 1 << 30,
        ..Limits::default()
    };
    let in_images = |name: &str, of: &dyn Fn(&str) -> bool| {
        name.strip_prefix(names::CHECKPOINT_DIR)
            .and_then(|rest| rest.strip_prefix('/'))
            .is_some_and(of)
    };
    let own = [
        names::METADATA,
        names::STORE_REFERENCE,
        names::CRIU_INVENTORY,
        names::NVIDIA_IMAGE,
    ];
    let wanted = |name: &str| {
        engine_records::FILES.contains(&name)
            || [names::NETWORK_STATUS, CONTAINERD_RECORD].contains(&name)
            || in_images(name, &|n| own.contains(&n) || amd_image::is_image(n))
            || file_sizes::is_wanted(name)
    };
    let identities = identities()?;
    let decoded = Decoding::of(ask.path)?.run(|| {
        let volumes = RefCell::new(BTreeSet::new());
        let has_image = Cell::new(false);
        let wanted = |name: &str| {
            has_image.set(has_image.get() || name == IMAGE);
            if let Some(volume) = names::volume(name) {
                volumes.borrow_mut().insert(volume.to_owned());
            }
            wanted(name)
        };
        let mut source = Source::open_image(ask.path, ask.image, &limits)?;
        source.unlock(&identities);
        let files = source.small_files(&wanted, &limits)?;
        let parts = source.containerd();
        // Only what goes on running can change the files that its engine packs.
        let runs_on = metadata(ask.path, &files)
            .ok()
            .flatten()
            .is_some_and(|m| m.container.leave_running);
        let grown = match runs_on {
            true => file_sizes::differences(&source, &files, &limits)?,
            false => Vec::new(),
        };
        let about = AboutCheckpoint {
            grown,
            kind: source.kind().to_string(),
            volumes: volumes.into_inner(),
            has_image: has_image.get(),
            annotations: parts.map(|parts| parts.index.annotations.clone()),
            files: files
                .iter()
                .map(|(name, b)| (name.clone(), b.len()))
                .collect(),
        };
        // One line, and then the files.
        let mut all = serde_json::to_vec(&about)?;
        all.push(b'\n');
        all.extend(files.into_values().flatten());
        Ok(all)
    });
    let (about, files) = files_of(&decoded?)?;
    let (kind, grown) = (about.kind.clone(), about.grown.clone());
    let records = records(ask.path, &files, about)?;
    let mut amd = Images::default();
    for (name, bytes) in &files {
        let name = name.rsplit('/').next().unwrap_or(name);
        amd.add(name, bytes)
            .map_err(|e| anyhow!("{}: {e}", ask.path.display()))?;
    }
    let metadata = metadata(ask.path, &files)?;
    let image = |name: &str| format!("{}/{name}", names::CHECKPOINT_DIR);
    let name = image(names::STORE_REFERENCE);
    let reference = files.get(&name);
    let reference = reference.map(|text| Reference::parse(text, &ask.path.join(&name)));
    Ok(Checkpoint {
        kind,
        reference: reference.transpose()?,
        metadata,
        grown,
        spec: spec(&files),
        amd,
        nvidia: files.get(&image(names::NVIDIA_IMAGE)).cloned(),
        records,
        inventory: files
            .get(&image(names::CRIU_INVENTORY))
            .cloned()
            .unwrap_or_default(),
    })
}

/// What the decoder tells beside the files.
#[derive(Serialize, Deserialize)]
struct AboutCheckpoint {
    kind: String,
    /// What is said of files that are not as CRIU saved them.
    grown: Vec<String>,
    volumes: BTreeSet<String>,
    has_image: bool,
    /// Of containerd's own checkpoint.
    annotations: Option<BTreeMap<String, String>>,
    /// Names and sizes, in the order of their bytes.
    files: Vec<(String, usize)>,
}

fn files_of(decoded: &[u8]) -> anyhow::Result<(AboutCheckpoint, BTreeMap<String, Vec<u8>>)> {
    let nonsense = || anyhow!("the process that decodes it makes no sense");
    let end = decoded
        .iter()
        .position(|b| *b == b'\n')
        .ok_or_else(nonsense)?;
    let (line, mut rest) = decoded.split_at(end);
    rest = &rest[1..];
    let mut about: AboutCheckpoint = serde_json::from_slice(line).map_err(|_| nonsense())?;
    let mut files = BTreeMap::new();
    for (name, bytes) in std::mem::take(&mut about.files) {
        let (file, after) = rest.split_at_checked(bytes).ok_or_else(nonsense)?;
        files.insert(name, file.to_vec());
        rest = after;
    }
    Ok((about, files))
}

fn records(
    path: &Path,
    files: &BTreeMap<String, Vec<u8>>,
    about: AboutCheckpoint,
) -> anyhow::Result<engine::Records> {
    let json = |name: &str| -> Value {
        let text = files.get(name);
        text.and_then(|text| serde_json::from_slice(text).ok())
            .unwrap_or_default()
    };
    let facts = match files.get(CONTAINERD_RECORD) {
        Some(record) => engine_records::read_containerd(
            CONTAINERD_RECORD,
            record,
            &about.annotations.unwrap_or_default(),
        ),
        None => engine_records::read(files),
    };
    Ok(engine::Records {
        facts: facts.with_context(|| path.display().to_string())?,
        config: json(names::CONFIG_DUMP),
        network_status: json(names::NETWORK_STATUS),
        volumes: about.volumes,
        has_image: about.has_image,
    })
}

fn metadata(path: &Path, files: &BTreeMap<String, Vec<u8>>) -> anyhow::Result<Option<Metadata>> {
    let name = format!("{}/{}", names::CHECKPOINT_DIR, names::METADATA);
    let Some(text) = files.get(&name) else {
        return Ok(None);
    };
    Ok(Some(Metadata::parse(text, &path.join(&name))?))
}

/// Reads the container's spec, if the archive has it, for its annotations and limits.
fn spec(files: &BTreeMap<String, Vec<u8>>) -> Spec {
    let json = files
        .get(names::SPEC_DUMP)
        .and_then(|text| serde_json::from_slice(text).ok());
    Spec::from_json(json.unwrap_or(serde_json::Value::Null))
}

fn report(
    ask: &ArchiveQuestion<'_>,
    checkpoint: &Checkpoint,
    answer: &RestoreAnswer,
) -> anyhow::Result<ExitCode> {
    let refusals = answer.refusals();
    let ok = refusals.is_empty();
    let mut out = std::io::stdout().lock();
    if ask.json {
        let report = ArchiveReport {
            ok,
            path: ask.path,
            kind: &checkpoint.kind,
            created: checkpoint.metadata.as_ref().map(|s| s.created.as_str()),
            checks: &answer.checks,
            refusals: refusals
                .iter()
                .map(|r| RefusalReason {
                    what: &r.what,
                    remedy: &r.remedy,
                })
                .collect(),
            map: answer
                .choices()
                .map(|c| GpuMove {
                    from: &c.old.id,
                    to: &c.new.id,
                    why: &c.why,
                })
                .collect(),
        };
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        out.write_all(printable(&table(checkpoint, answer)).as_bytes())?;
        for refusal in &answer.other {
            writeln!(
                out,
                "refused  {}\n         -> {}",
                printable(&refusal.what),
                printable(&refusal.remedy)
            )?;
        }
        let verdict = match (ok, &checkpoint.metadata) {
            (true, Some(_)) => "This checkpoint can be restored on this host.",
            (true, None) => {
                "It has no cryopod.json: a checkpoint of a container without GPUs, or of another tool. A restore checks the rest."
            }
            (false, _) => {
                "This checkpoint cannot be restored on this host: see the lines marked `refused`."
            }
        };
        writeln!(out, "{verdict}")?;
    }
    Ok(match ok {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn table(checkpoint: &Checkpoint, answer: &RestoreAnswer) -> String {
    let mut text = match &checkpoint.metadata {
        Some(metadata) => format!("{}, made {}\n\n", checkpoint.kind, metadata.created),
        None => format!("{}\n\n", checkpoint.kind),
    };
    let width = answer
        .checks
        .iter()
        .map(|c| c.name.len())
        .max()
        .unwrap_or(0);
    for check in &answer.checks {
        let verdict = match check.verdict {
            Verdict::Ok => "ok",
            Verdict::Relaxed => "relaxed",
            Verdict::Unknown => "unknown",
            Verdict::Refused => "refused",
        };
        let about = match check.subject.as_str() {
            "" => String::new(),
            subject => format!("{subject}: "),
        };
        text.push_str(&format!(
            "{verdict:<9}{:<width$}  {about}recorded {}, found {}\n",
            check.name, check.recorded, check.found
        ));
        if check.verdict == Verdict::Refused {
            text.push_str(&format!("{:<9}{:<width$}  -> {}\n", "", "", check.remedy));
            if let Some(switch) = &check.switch {
                text.push_str(&format!(
                    "{:<9}{:<width$}  -> relaxed by {switch}\n",
                    "", ""
                ));
            }
        }
    }
    for choice in answer.choices() {
        let why = match choice.why.as_str() {
            "" => String::new(),
            why => format!(" ({why})"),
        };
        text.push_str(&format!(
            "map      {} -> {}{why}\n",
            choice.old.id, choice.new.id
        ));
    }
    text.push('\n');
    text
}
