//! Decodes CRIU's images for a restore in a child that can do little ([`cryopod_host::sandbox`]). Whoever takes it over has
//! no capability and no program, and of the files only the checkpoint's, to read.
//!
//! The child checks the images ([`image_check`]), compares them with the spec ([`privileges`]), and answers with plain
//! values and with the messages encoded anew. This process decodes none of CRIU's messages; it writes what CRIU may read
//! under names that it knows.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cryopod_archive::criu::image_files::{ImageContent, ImageError, ImageFile, content_of};
use cryopod_archive::criu::mounts::CriuMount;
use cryopod_archive::criu::needs::{self, RestoreNeeds};
use cryopod_archive::criu::network::{self, Network};
use cryopod_archive::criu::{self, has_compressed_pages, open_files};
use cryopod_archive::format::names;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::micros;
use cryopod_host::sandbox::{Sandbox, SandboxError, real};
use serde::{Deserialize, Serialize};

use super::image_check::namespaces::NamespaceValues;
use super::image_check::opened::{self, ReachedPaths};
use super::image_check::{self, CheckedImages, Subject, mounts};
use super::privileges::{self, Given, LeftOpen, PrivilegesError};
use crate::config::{Config, IMAGES_CHECK};

/// The longest chain of checkpoints that is followed.
const MAX_PARENTS: usize = 1024;
/// At most so many faults of images are reported.
const MAX_TOLD: usize = 20;
const FILES: &str = "files.img";
/// Images by which CRIU finds files that have lost their name.
const OF_LINKS: [&str; 2] = [FILES, "remap-fpath.img"];

/// What is decoded, and what it is compared with.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub config: &'a Config,
    pub directory: &'a Path,
    /// Device nodes that the container may have.
    pub devices: &'a [(u32, u32)],
    pub given: Given<'a>,
    pub limit: Duration,
}

/// What a restore has to know of CRIU's images. What could not be decoded is among the refusals; with the check of the
/// images off, it is an error where somebody needs it.
#[derive(Debug, Serialize, Deserialize)]
pub struct DecodedImages {
    pub refusals: Vec<Refusal>,
    warnings: Vec<String>,
    /// What the restore closes by itself.
    pub left_open: Vec<LeftOpen>,
    mounts: Result<Vec<CriuMount>, String>,
    network: Result<Option<Network>, String>,
    /// Paths of the links by which CRIU finds files that have lost their name.
    links: Result<Vec<String>, String>,
    /// What the processes take from the host; `None`: it is not known.
    pub needs: Option<RestoreNeeds>,
    /// The memory pages are compressed.
    pub is_compressed: bool,
    /// `None`: the check is off, and CRIU reads the images as they are.
    #[serde(skip)]
    pub encoded: Option<EncodedImages>,
    checked: Option<Checked>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Checked {
    /// Names and sizes of the encoded images, which follow.
    sizes: Vec<(String, usize)>,
    as_they_are: BTreeSet<String>,
    reached: ReachedPaths,
}

/// CRIU's images as CRIU may see them.
#[derive(Debug, Default)]
pub struct EncodedImages {
    /// Images that are made of messages.
    pub written: BTreeMap<String, Vec<u8>>,
    /// Files that CRIU may read as they are in the checkpoint.
    pub as_they_are: BTreeSet<String>,
    pub reached: ReachedPaths,
}

/// Decodes the images, and returns every reason why they must not be restored.
pub fn decode(question: Question<'_>) -> Result<DecodedImages, PrivilegesError> {
    let is_checked = question.is_checked();
    if !is_checked {
        tracing::warn!("the check {IMAGES_CHECK} is off: CRIU reads the images as they are");
    }
    let values = match is_checked {
        true => NamespaceValues::of(question.given.spec),
        false => NamespaceValues::default(),
    };
    let sandbox = Sandbox {
        read: with_parents(question.directory),
        write: Vec::new(),
    };
    let start = Instant::now();
    let answer = sandbox.run(question.limit, || {
        // The log's descriptor is closed here, and its number may become another file's.
        tracing::dispatcher::with_default(&tracing::Dispatch::none(), || question.answer(&values))
    })?;
    let decoded = DecodedImages::received(&answer)?;
    tracing::debug!(
        "CRIU's images were checked within {} us",
        micros(start.elapsed())
    );
    for warning in &decoded.warnings {
        tracing::warn!("{warning}");
    }
    Ok(decoded)
}

/// The directory and those of the checkpoints that it builds upon.
fn with_parents(directory: &Path) -> Vec<PathBuf> {
    let mut all = vec![real(directory)];
    let mut at = directory.join(names::PARENT_LINK);
    while let Ok(parent) = at.canonicalize() {
        if all.contains(&parent) || all.len() > MAX_PARENTS {
            break;
        }
        at = parent.join(names::PARENT_LINK);
        all.push(parent);
    }
    all
}

impl Question<'_> {
    fn is_checked(&self) -> bool {
        self.config.checks.get(IMAGES_CHECK).copied() != Some(false)
    }

    /// What the child does. Returns the length of the values, the values and the images.
    fn answer(&self, values: &NamespaceValues) -> Result<Vec<u8>, PrivilegesError> {
        let subject = Subject {
            facts: self.given.facts,
            values,
            spec: self.given.spec,
            devices: self.devices,
        };
        let (checked, faults) = match self.is_checked() {
            true => {
                let (images, faults) = image_check::check(self.directory, subject)?;
                (Some(images), faults)
            }
            false => (None, Vec::new()),
        };
        // The process ends with this function; freeing a million fields would only take time.
        let checked = ManuallyDrop::new(checked);
        let encoded: Option<BTreeMap<&str, Vec<u8>>> =
            checked.as_ref().map(CheckedImages::written).transpose()?;
        let open = |name: &str| match &encoded {
            Some(encoded) => Ok(encoded.get(name).cloned()),
            None => privileges::open(self.directory, name),
        };
        let mut refused: Vec<Refusal> = faults.into_iter().take(MAX_TOLD).map(refusal).collect();
        let is_damaged = !refused.is_empty();
        let compared = privileges::compare(self.config, open, self.given);
        let compared = usable(compared, is_damaged).map_err(failed)?;
        refused.extend(compared.refusals);
        let mut decoded = DecodedImages {
            refusals: refused,
            warnings: compared.warnings,
            left_open: compared.left_open,
            mounts: usable(self.mounts(checked.as_ref()), is_damaged),
            network: usable(network::of_first(open), is_damaged),
            links: usable(links(open), is_damaged),
            needs: needs::read(open, largest_pages(self.directory)).ok(),
            is_compressed: open(names::CRIU_INVENTORY)?
                .is_some_and(|i| has_compressed_pages(&i).unwrap_or(false)),
            encoded: None,
            checked: checked.as_ref().map(|images| Checked {
                sizes: Vec::new(),
                as_they_are: images.shown().map(str::to_owned).collect(),
                reached: opened::reached(images),
            }),
        };
        let images = encoded.into_iter().flatten();
        let images: Vec<(&str, Vec<u8>)> = images.collect();
        if let Some(checked) = &mut decoded.checked {
            let sizes = images.iter().map(|(name, i)| ((*name).to_owned(), i.len()));
            checked.sizes = sizes.collect();
        }
        let values = serde_json::to_vec(&decoded).map_err(nonsense)?;
        let mut answer = values.len().to_le_bytes().to_vec();
        answer.extend(values);
        for (_, image) in &images {
            answer.extend(image);
        }
        Ok(answer)
    }

    fn raw_mounts(&self) -> Result<Vec<CriuMount>, PrivilegesError> {
        let mut all = Vec::new();
        let files = self.directory.read_dir().into_iter().flatten().flatten();
        for name in files.filter_map(|f| f.file_name().into_string().ok()) {
            if names::is_numbered(&name, mounts::PREFIX) {
                let image = privileges::open(self.directory, &name)?.unwrap_or_default();
                all.extend(criu::mounts::read(&name, &image)?);
            }
        }
        Ok(all)
    }

    fn mounts(&self, checked: Option<&CheckedImages>) -> Result<Vec<CriuMount>, PrivilegesError> {
        match checked {
            Some(images) => mounts::read(images),
            None => self.raw_mounts(),
        }
    }
}

/// Returns the size of the largest file of memory pages.
fn largest_pages(directory: &Path) -> u64 {
    let files = directory.read_dir().into_iter().flatten().flatten();
    let pages = files.filter(|f| {
        let name = f.file_name();
        name.to_str()
            .is_some_and(|n| names::is_numbered(n, names::PAGES))
    });
    let sizes = pages.filter_map(|f| Some(f.metadata().ok()?.len()));
    sizes.max().unwrap_or(0)
}

/// The links by which CRIU finds files that have lost their name.
fn links(
    open: impl Fn(&str) -> Result<Option<Vec<u8>>, PrivilegesError>,
) -> Result<Vec<String>, PrivilegesError> {
    let mut images = BTreeMap::new();
    for name in OF_LINKS {
        images.extend(open(name)?.map(|content| (name.to_owned(), content)));
    }
    Ok(open_files::links(&images)?)
}

/// What could not be decoded is among the refusals, if there are some.
fn usable<T: Default>(decoded: Result<T, PrivilegesError>, is_damaged: bool) -> Result<T, String> {
    match decoded {
        Err(_) if is_damaged => Ok(T::default()),
        decoded => decoded.map_err(|e| e.to_string()),
    }
}

/// Refuses a restore for a fault of the images.
pub fn refusal(what: String) -> Refusal {
    Refusal::new(
        what,
        format!(
            "make the checkpoint anew; if you trust this one, set `{IMAGES_CHECK} = false` under [checks] in {}",
            crate::config::PATH
        ),
    )
}

fn failed(what: String) -> PrivilegesError {
    SandboxError::Failed(what).into()
}

fn nonsense(e: impl std::fmt::Display) -> PrivilegesError {
    SandboxError::Ended(format!("makes no sense: {e}")).into()
}

impl DecodedImages {
    /// Takes an answer apart. The child may be a stranger's by now: what it names is of the kind that is wanted.
    fn received(answer: &[u8]) -> Result<Self, PrivilegesError> {
        let cut = || nonsense("it is cut off");
        let (length, rest) = answer.split_first_chunk().ok_or_else(cut)?;
        let length = usize::from_le_bytes(*length);
        let (values, mut rest) = rest.split_at_checked(length).ok_or_else(cut)?;
        let mut decoded: Self = serde_json::from_slice(values).map_err(nonsense)?;
        if let Ok(Some(network)) = &decoded.network
            && !names::is_numbered(&network.file, "netns-")
        {
            return Err(nonsense(format!("{:?} is no namespace", network.file)));
        }
        let Some(checked) = decoded.checked.take() else {
            return Ok(decoded);
        };
        let mut written = BTreeMap::new();
        for (name, size) in checked.sizes {
            let (image, more) = rest.split_at_checked(size).ok_or_else(cut)?;
            if !matches!(content_of(&name), Some((ImageContent::Messages(_), _))) {
                return Err(nonsense(format!("{name:?} is no image")));
            }
            written.insert(name, image.to_vec());
            rest = more;
        }
        decoded.encoded = Some(EncodedImages {
            written,
            as_they_are: checked.as_they_are,
            reached: checked.reached,
        });
        Ok(decoded)
    }

    /// Returns all mounts.
    pub fn mounts(&self) -> Result<&[CriuMount], PrivilegesError> {
        self.mounts.as_deref().map_err(|e| failed(e.clone()))
    }

    pub fn links(&self) -> Result<&[String], PrivilegesError> {
        self.links.as_deref().map_err(|e| failed(e.clone()))
    }

    /// Returns the network namespace of the first process; `None`: the host's.
    pub fn network(&self) -> Result<Option<&Network>, PrivilegesError> {
        let network = self.network.as_ref().map_err(|e| failed(e.clone()))?;
        Ok(network.as_ref())
    }
}

impl EncodedImages {
    /// Returns true for a file that CRIU may read as it is in the checkpoint.
    pub fn shows(&self, name: &str) -> bool {
        self.as_they_are.contains(name)
    }

    /// Gives files other sizes, by CRIU's number.
    pub fn set_sizes(
        &mut self,
        sizes: &BTreeMap<u64, u64>,
        limit: Duration,
    ) -> Result<(), PrivilegesError> {
        let Some(content) = self.written.get(FILES).filter(|_| !sizes.is_empty()) else {
            return Ok(());
        };
        let resized = Sandbox::default().run(limit, || {
            let mut image = ImageFile::decode(FILES, content)?;
            for message in &mut image.messages {
                if let Some(regular) = message.message_mut("reg")
                    && let Some(now) = regular.number("id").and_then(|id| sizes.get(&id))
                {
                    regular.set_number("size", *now);
                }
            }
            Ok::<_, ImageError>(image.encode())
        })?;
        self.written.insert(FILES.to_owned(), resized);
        Ok(())
    }
}

#[cfg(test)]
#[path = "decoder_tests.rs"]
mod tests;
