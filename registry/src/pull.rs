//! Pulls an image from a registry into an OCI image layout.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cryopod_archive::Error as ArchiveError;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::names;
use cryopod_archive::format::oci::{Descriptor, Index, Manifest, annotation, media};
use cryopod_host::files::{create_private, sync_directory};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::statvfs::statvfs;
use oci_spec::distribution::Reference;
use sha2::{Digest as _, Sha256};

use crate::client::Registry;
use crate::known::{BlobParts, KnownBlobs, put_together};
use crate::session::TokenAccess;
use crate::text::causes;
use crate::transfer::{Flow, run, while_flowing, with_tries};
use crate::{Error, RegistryOptions, Transferred};

/// Most layers of an image, as in an archive.
const MAX_LAYERS: usize = 128;
/// Largest manifest, in bytes.
const MAX_MANIFEST: usize = 4 << 20;

/// Pulls an image into a layout that does not exist yet. A hidden directory beside it keeps partial data, so the next
/// try continues from there. After an [`Error`] no layout has that name.
pub fn pull(
    from: &Reference,
    layout: &Path,
    options: &RegistryOptions,
) -> Result<Transferred, Error> {
    pull_with(from, layout, options, &())
}

/// Pulls an image as [`pull`] does, except for what this host has of it already.
pub fn pull_with(
    from: &Reference,
    layout: &Path,
    options: &RegistryOptions,
    known: &dyn KnownBlobs,
) -> Result<Transferred, Error> {
    run(pull_all(from, layout, options, known), &from.to_string())
}

/// Asks a registry for the digest of an image's manifest.
pub fn digest(of: &Reference, options: &RegistryOptions) -> Result<Digest, Error> {
    let ask = async {
        let registry = Registry::connect(of, TokenAccess::Pull, options).await?;
        let (raw, _) = manifest(&registry, options).await?;
        Ok(Digest::of(&raw))
    };
    run(ask, &of.to_string())
}

async fn pull_all(
    from: &Reference,
    layout: &Path,
    options: &RegistryOptions,
    known: &dyn KnownBlobs,
) -> Result<Transferred, Error> {
    let work = PullWork::begin(layout)?;
    let registry = Registry::connect(from, TokenAccess::Pull, options).await?;
    let (raw, manifest) = manifest(&registry, options).await?;
    let digest = Digest::of(&raw);

    let mut seen = BTreeSet::new();
    let blobs: Vec<&Descriptor> = (manifest.layers.iter())
        .chain([&manifest.config])
        .filter(|d| seen.insert(&d.digest))
        .collect();
    let total = blobs.iter().fold(0u64, |sum, d| sum.saturating_add(d.size));
    options.progress.set_total(total);
    let mut missing: Vec<&Descriptor> = blobs.iter().copied().filter(|d| !work.has(d)).collect();
    let have = blobs.len() - missing.len();
    let needed = missing
        .iter()
        .fold(0u64, |sum, d| sum.saturating_add(d.size));
    options.progress.add_done(total - needed);
    work.room_for(needed, layout)?;
    let (skipped, bytes) = (AtomicUsize::new(have), AtomicU64::new(0));
    let whole = async |blob: &Descriptor| {
        with_tries(options.tries, || pull_blob(&registry, &work, blob, options)).await?;
        bytes.fetch_add(blob.size, Ordering::Relaxed);
        Ok::<_, Error>(())
    };
    // It tells what the others hold.
    let mut parts = BTreeMap::new();
    if let Some(first) = manifest.layers.first() {
        if missing.first().is_some_and(|d| d.digest == first.digest) {
            whole(missing.remove(0)).await?;
        }
        parts = known.pieces(&work.blob(&first.digest), &manifest);
    }
    let planned = missing.into_iter().map(|blob| {
        let pieces = parts.remove(&blob.digest).unwrap_or_default();
        Ok((blob, BlobParts::of(pieces, blob.size)))
    });
    let planned: Vec<_> = planned.collect();
    stream::iter(planned)
        .try_for_each_concurrent(options.parallel.max(1), |(blob, parts)| {
            let (registry, work, bytes, whole) = (&registry, &work, &bytes, &whole);
            async move {
                if let Some(parts) = parts {
                    match pull_parts(registry, work, blob, parts, options).await {
                        Ok(fetched) => {
                            bytes.fetch_add(fetched, Ordering::Relaxed);
                            return Ok(());
                        }
                        Err(e) => tracing::warn!("{e}; all of it is fetched"),
                    }
                }
                whole(blob).await
            }
        })
        .await?;
    work.finish(layout, &raw, &digest, from)?;
    Ok(Transferred {
        digest,
        blobs: blobs.len(),
        skipped: skipped.into_inner(),
        bytes: bytes.into_inner(),
    })
}

/// Reads the manifest, and checks its digest if the image names one.
pub(crate) async fn manifest(
    registry: &Registry,
    options: &RegistryOptions,
) -> Result<(Vec<u8>, Manifest), Error> {
    let accepted = [
        media::MANIFEST,
        media::INDEX,
        "application/vnd.docker.distribution.manifest.list.v2+json",
    ];
    let step = "reading the manifest";
    let (image, session) = (&registry.image, &registry.session);
    let name = image.digest().or(image.tag()).unwrap_or("latest");
    let raw = with_tries(options.tries, || {
        registry.within(step, async {
            let place = format!("manifests/{name}");
            let answer = session.get(step, &place, &accepted).await?;
            session.bounded(step, answer, MAX_MANIFEST).await
        })
    })
    .await?;
    let wrong = |reason: &str| registry.content(reason);
    if let Some(wanted) = registry.image.digest() {
        let found = Digest::of(&raw).to_string();
        if found != wanted {
            return Err(wrong(&format!("the registry sent the manifest {found}")));
        }
    }
    let value: serde_json::Value = serde_json::from_slice(&raw)
        .map_err(|e| wrong(&format!("its manifest is no JSON: {e}")))?;
    let kind = value.get("mediaType").and_then(|m| m.as_str());
    if value.get("manifests").is_some() || kind.is_some_and(|k| k != media::MANIFEST) {
        return Err(wrong(
            "it is a list of images, or of another kind, and a checkpoint is one OCI image",
        ));
    }
    let manifest: Manifest = serde_json::from_value(value)
        .map_err(|e| wrong(&format!("its manifest is not one of an OCI image: {e}")))?;
    if manifest.layers.len() > MAX_LAYERS {
        return Err(wrong("it has more layers than a checkpoint has"));
    }
    Ok((raw, manifest))
}

/// Returns how many bytes came from the registry.
async fn pull_parts(
    registry: &Registry,
    work: &PullWork,
    blob: &Descriptor,
    parts: BlobParts,
    options: &RegistryOptions,
) -> Result<u64, Error> {
    let partial = work.partial(&blob.digest);
    let _ = fs::remove_file(&partial);
    let fetched = put_together(registry, &partial, blob, parts, options).await;
    let fetched = fetched.inspect_err(|_| {
        let _ = fs::remove_file(&partial);
    })?;
    let name = work.blob(&blob.digest);
    fs::rename(&partial, &name).map_err(ArchiveError::io(&name, "name it"))?;
    Ok(fetched)
}

async fn pull_blob(
    registry: &Registry,
    work: &PullWork,
    blob: &Descriptor,
    options: &RegistryOptions,
) -> Result<(), Error> {
    let digest = blob.digest.to_string();
    let step = format!("receiving {digest}");
    // Only from the registry: the descriptor's `urls` could name any host.
    let place = format!("blobs/{digest}");
    let asked = registry.session.get(&step, &place, &[]);
    let mut stream = registry.within(&step, asked).await?.bytes_stream();
    let flow = Flow::default();
    let (sender, receiver) = tokio::sync::mpsc::channel::<bytes::Bytes>(16);
    let partial = work.partial(&blob.digest);
    let (size, counted, progress) = (blob.size, Arc::clone(&flow), Arc::clone(&options.progress));
    let writing = tokio::task::spawn_blocking({
        let partial = partial.clone();
        move || {
            write_blob(&partial, receiver, size, &|n| {
                counted.fetch_add(n, Ordering::Relaxed);
                progress.add_done(n);
            })
        }
    });
    let receiving = async {
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|e| registry.failed(&step, causes(&e)))?;
            if sender.send(chunk).await.is_err() {
                break; // the writer failed and reports it
            }
        }
        drop(sender);
        Ok(())
    };
    let received = while_flowing(receiving, &flow, options.stall_limit).await;
    let received: Result<(), Error> = received.unwrap_or_else(|| {
        let reason = format!("nothing moved for {} s", options.stall_limit.as_secs());
        Err(registry.failed(&step, reason))
    });
    let done = match (received, writing.await) {
        (Err(e), _) => Err(e),
        (_, Err(e)) => Err(registry.failed(&step, e.to_string())),
        (_, Ok(Err(e))) => Err(ArchiveError::from_io(&partial, "write it", e).into()),
        (_, Ok(Ok((bytes, _)))) if bytes != blob.size => Err(registry.failed(
            &step,
            format!("{bytes} bytes came, {} were promised", blob.size),
        )),
        (_, Ok(Ok((_, found)))) if found != blob.digest => {
            Err(registry.content(format!("blob {digest} came with the digest {found}")))
        }
        _ => {
            let name = work.blob(&blob.digest);
            fs::rename(&partial, &name).map_err(ArchiveError::io(&name, "name it"))?;
            Ok(())
        }
    };
    if done.is_err() {
        options.progress.take_back(flow.load(Ordering::Relaxed));
        let _ = fs::remove_file(&partial);
    }
    done
}

/// Writes, hashes and syncs the data; writes at most `size` bytes plus one chunk.
fn write_blob(
    path: &Path,
    mut chunks: tokio::sync::mpsc::Receiver<bytes::Bytes>,
    size: u64,
    count: &dyn Fn(u64),
) -> io::Result<(u64, Digest)> {
    let _ = fs::remove_file(path);
    let mut file = create_private(path)?;
    let mut hash = Sha256::new();
    let mut bytes = 0;
    while let Some(chunk) = chunks.blocking_recv() {
        bytes += chunk.len() as u64;
        if bytes > size {
            break; // the size check reports it
        }
        hash.update(&chunk);
        file.write_all(&chunk)?;
        count(chunk.len() as u64);
    }
    file.sync_all()?;
    Ok((bytes, Digest::from_hash(hash)))
}

/// The hidden directory that becomes the layout.
struct PullWork {
    dir: PathBuf,
    _lock: Flock<File>,
}

impl PullWork {
    fn begin(layout: &Path) -> Result<Self, Error> {
        if fs::symlink_metadata(layout).is_ok() {
            return Err(ArchiveError::Exists {
                path: layout.into(),
            }
            .into());
        }
        let name = layout.file_name().unwrap_or_default().to_string_lossy();
        let dir = parent(layout).join(format!(".{name}.cryopod-pull"));
        let blobs = dir.join(names::OCI_BLOBS).join("sha256");
        let made = DirBuilder::new().mode(0o700).create(&dir);
        if let Err(e) = made
            && e.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(ArchiveError::io(&dir, "make it")(e).into());
        }
        // In a directory like /tmp another user could have planted one with links in it.
        let own = |m: &fs::Metadata| {
            m.is_dir() && m.uid() == nix::unistd::geteuid().as_raw() && m.mode() & 0o022 == 0
        };
        if !fs::symlink_metadata(&dir).is_ok_and(|m| own(&m)) {
            let e = io::Error::other(
                "it is another user's, or others can write there; remove it, or choose another name",
            );
            return Err(ArchiveError::from_io(&dir, "use it", e).into());
        }
        fs::create_dir_all(&blobs).map_err(ArchiveError::io(&dir, "make it"))?;
        let place = dir.join(".lock");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&place)
            .map_err(ArchiveError::io(&place, "make it"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| {
            let e = match e {
                nix::errno::Errno::EWOULDBLOCK => io::Error::other(
                    "another pull to this name is running; wait for it, or choose another name",
                ),
                e => e.into(),
            };
            ArchiveError::from_io(&place, "lock it", e)
        })?;
        Ok(Self { dir, _lock: lock })
    }

    fn blob(&self, digest: &Digest) -> PathBuf {
        self.dir
            .join(names::OCI_BLOBS)
            .join("sha256")
            .join(digest.hex())
    }

    fn partial(&self, digest: &Digest) -> PathBuf {
        self.blob(digest).with_extension("partial")
    }

    /// Returns true if the blob exists and is intact. Reads it, because leftovers of an earlier run may have changed.
    fn has(&self, blob: &Descriptor) -> bool {
        let check = || -> io::Result<bool> {
            let file = File::open(self.blob(&blob.digest))?;
            Ok(file.metadata()?.len() == blob.size && Digest::of_reader(file)? == blob.digest)
        };
        check().unwrap_or(false)
    }

    fn room_for(&self, needed: u64, layout: &Path) -> Result<(), Error> {
        let Ok(stat) = statvfs(&self.dir) else {
            return Ok(()); // the write reports errors
        };
        let free = stat.blocks_available().saturating_mul(stat.fragment_size());
        if free < needed {
            return Err(ArchiveError::NoSpace {
                path: layout.into(),
                needed,
                free,
            }
            .into());
        }
        Ok(())
    }

    /// Writes the layout's documents and gives it its name.
    fn finish(
        &self,
        layout: &Path,
        raw: &[u8],
        digest: &Digest,
        from: &Reference,
    ) -> Result<(), Error> {
        self.write(&self.blob(digest), raw)?;
        let mut descriptor = Descriptor::new(media::MANIFEST, digest.clone(), raw.len() as u64);
        if let Some(tag) = from.tag() {
            descriptor
                .annotations
                .insert(annotation::REF_NAME.into(), tag.into());
        }
        let index = Index {
            schema_version: 2,
            media_type: Some(media::INDEX.into()),
            manifests: vec![descriptor],
            annotations: Default::default(),
        };
        let index = serde_json::to_vec(&index)
            .map_err(|e| ArchiveError::from_io(layout, "write its index", io::Error::other(e)))?;
        self.write(&self.dir.join(names::OCI_INDEX), &index)?;
        self.write(
            &self.dir.join(names::OCI_LAYOUT),
            br#"{"imageLayoutVersion":"1.0.0"}"#,
        )?;
        self.drop_strangers(digest, raw)?;
        let _ = fs::remove_file(self.dir.join(".lock"));
        for dir in [
            self.dir.join(names::OCI_BLOBS).join("sha256"),
            self.dir.join(names::OCI_BLOBS),
            self.dir.clone(),
        ] {
            sync(&dir)?;
        }
        fs::rename(&self.dir, layout).map_err(ArchiveError::io(layout, "name it"))?;
        sync(parent(layout))
    }

    /// Removes blobs of another image that an earlier run pulled under the same name.
    fn drop_strangers(&self, digest: &Digest, raw: &[u8]) -> Result<(), Error> {
        let dir = self.dir.join(names::OCI_BLOBS).join("sha256");
        let text = String::from_utf8_lossy(raw);
        for item in fs::read_dir(&dir).map_err(ArchiveError::io(&dir, "list it"))? {
            let item = item.map_err(ArchiveError::io(&dir, "list it"))?;
            let name = item.file_name().to_string_lossy().into_owned();
            if name != digest.hex() && !text.contains(&format!("sha256:{name}")) {
                let _ = fs::remove_file(item.path());
            }
        }
        Ok(())
    }

    fn write(&self, path: &Path, content: &[u8]) -> Result<(), Error> {
        let write = || -> io::Result<()> {
            let mut file = File::create(path)?;
            file.write_all(content)?;
            file.sync_all()
        };
        write().map_err(|e| ArchiveError::from_io(path, "write it", e).into())
    }
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

fn sync(dir: &Path) -> Result<(), Error> {
    sync_directory(dir).map_err(|e| ArchiveError::from_io(dir, "sync it", e).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_a_directory_of_this_user_alone_is_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let layout = dir.path().join("job");
        let hidden = dir.path().join(".job.cryopod-pull");
        let refused = || match PullWork::begin(&layout) {
            Ok(_) => panic!("taken"),
            Err(e) => e.to_string(),
        };
        std::os::unix::fs::symlink(dir.path(), &hidden).unwrap();
        assert!(refused().contains("another user's"));
        fs::remove_file(&hidden).unwrap();
        fs::create_dir(&hidden).unwrap();
        fs::set_permissions(&hidden, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(refused().contains("others can write there"));
        fs::remove_dir(&hidden).unwrap();
        let work = PullWork::begin(&layout).unwrap();
        assert!(refused().contains("another pull to this name"));
        drop(work);
        // The next try reuses partial data.
        fs::write(hidden.join("blobs/sha256/aa"), "x").unwrap();
        PullWork::begin(&layout).unwrap();
        assert!(hidden.join("blobs/sha256/aa").exists());
        fs::create_dir(&layout).unwrap();
        assert!(refused().contains("exists already"));
    }
}
