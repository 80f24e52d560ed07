//! Pushes an OCI image layout, or a tar of one, to a registry.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::oci::{Descriptor, media};
use cryopod_archive::source::Source;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use oci_spec::distribution::Reference;
use reqwest::Body;
use sha2::{Digest as _, Sha256};

use crate::client::Registry;
use crate::pull::manifest;
use crate::session::TokenAccess;
use crate::transfer::{Flow, run, while_flowing, with_tries};
use crate::{Error, RegistryOptions, Transferred};

const CHUNK: usize = 1 << 20;
/// Chunks between the disk and the network.
const QUEUE: usize = 4;

/// Pushes an image. After an [`Error`] the image's name in the registry is unchanged.
pub fn push(
    source: &Source,
    to: &Reference,
    options: &RegistryOptions,
) -> Result<Transferred, Error> {
    run(push_all(source, to, options), &to.to_string())
}

async fn push_all(
    source: &Source,
    to: &Reference,
    options: &RegistryOptions,
) -> Result<Transferred, Error> {
    let raw = Bytes::from(source.manifest()?);
    let image = source.image().ok_or_else(|| Error::NotFound {
        image: source.path().display().to_string(),
    })?;
    if to.digest().is_some_and(|d| d != image.digest.to_string()) {
        return Err(Error::Content {
            image: to.to_string(),
            reason: format!("the archive's digest is {}", image.digest),
        });
    }
    let registry = Registry::connect(to, TokenAccess::Push, options).await?;

    let mut seen = BTreeSet::new();
    let blobs: Vec<&Descriptor> = (image.manifest.layers.iter())
        .chain([&image.manifest.config])
        .filter(|d| seen.insert(&d.digest))
        .collect();
    options
        .progress
        .set_total(blobs.iter().map(|d| d.size).sum());
    let (skipped, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    stream::iter(blobs.iter().map(Ok))
        .try_for_each_concurrent(options.parallel.max(1), |blob| {
            let (registry, skipped, bytes) = (&registry, &skipped, &bytes);
            async move {
                let sent = with_tries(options.tries, || push_blob(registry, source, blob, options))
                    .await?;
                if sent {
                    bytes.fetch_add(blob.size, Ordering::Relaxed);
                } else {
                    skipped.fetch_add(1, Ordering::Relaxed);
                }
                Ok::<_, Error>(())
            }
        })
        .await?;

    // Last: until now the image has no name.
    let step = "writing the manifest";
    let name = to.digest().or(to.tag()).unwrap_or("latest");
    with_tries(options.tries, || {
        let sent = registry
            .session
            .send_manifest(step, name, media::MANIFEST, raw.clone());
        registry.within(step, sent)
    })
    .await?;
    let (there, _) = manifest(&registry, options).await?;
    let found = Digest::of(&there);
    if found != image.digest {
        return Err(registry.content(format!(
            "the registry has {found} under that name, not {} as was pushed",
            image.digest
        )));
    }
    Ok(Transferred {
        digest: image.digest.clone(),
        blobs: blobs.len(),
        skipped: skipped.into_inner(),
        bytes: bytes.into_inner(),
    })
}

/// Returns `false` if the registry already has the blob.
async fn push_blob(
    registry: &Registry,
    source: &Source,
    blob: &Descriptor,
    options: &RegistryOptions,
) -> Result<bool, Error> {
    let digest = blob.digest.to_string();
    let step = format!("asking for {digest}");
    let asked = registry.session.has_blob(&step, &digest);
    if registry.within(&step, asked).await? {
        options.progress.add_done(blob.size);
        return Ok(false);
    }
    let step = format!("sending {digest}");
    let begun = registry.session.begin_blob(&step, &digest);
    let place = registry.within(&step, begun).await?;
    let flow = Flow::default();
    let reader = source.blob(blob)?;
    let (sender, receiver) = tokio::sync::mpsc::channel(QUEUE);
    let wanted = blob.digest.clone();
    let reading = tokio::task::spawn_blocking(move || read_blob(reader, &wanted, &sender));
    let counted = Arc::clone(&flow);
    let progress = Arc::clone(&options.progress);
    let chunks = stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    })
    .inspect(move |chunk: &io::Result<Bytes>| {
        if let Ok(chunk) = chunk {
            counted.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            progress.add_done(chunk.len() as u64);
        }
    });
    let body = Body::wrap_stream(chunks);
    let pushed = registry.session.send_blob(&step, place, blob.size, body);
    let pushed = while_flowing(pushed, &flow, options.stall_limit).await;
    let done = match pushed {
        None => Err(registry.failed(
            &step,
            format!("nothing moved for {} s", options.stall_limit.as_secs()),
        )),
        Some(done) => done.map(|()| true),
    };
    if done.is_err() {
        options.progress.take_back(flow.load(Ordering::Relaxed));
        // Prefer the reading error: the registry only sees that the connection ended.
        if let Ok(Ok(Err(reason))) = tokio::time::timeout(options.step_limit, reading).await {
            return Err(Error::Content {
                image: source.path().display().to_string(),
                reason: reason.to_string(),
            });
        }
    }
    done
}

/// Reads a blob into the queue. Stops before its last chunk if the digest is wrong.
fn read_blob(
    mut reader: impl Read,
    wanted: &Digest,
    queue: &tokio::sync::mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let fail = |reason: String| {
        let _ = queue.blocking_send(Err(io::Error::other(reason.clone())));
        Err(io::Error::other(reason))
    };
    let mut hash = Sha256::new();
    let mut last: Option<Bytes> = None;
    loop {
        let mut chunk = vec![0; CHUNK];
        let mut have = 0;
        while have < CHUNK {
            match reader.read(&mut chunk[have..]) {
                Ok(0) => break,
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return fail(format!("blob {wanted} cannot be read: {e}")),
            }
        }
        if have == 0 {
            break;
        }
        chunk.truncate(have);
        hash.update(&chunk);
        if let Some(ready) = last.replace(chunk.into())
            && queue.blocking_send(Ok(ready)).is_err()
        {
            return Ok(()); // the transfer has ended
        }
        if have < CHUNK {
            break;
        }
    }
    let found = Digest::from_hash(hash);
    if found != *wanted {
        return fail(format!(
            "blob {wanted} has the digest {found}: it is damaged"
        ));
    }
    if let Some(ready) = last {
        let _ = queue.blocking_send(Ok(ready));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_of_a_changed_blob_is_held_back() {
        for size in [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK] {
            let blob = vec![7; size];
            let sent = |wanted: &Digest| {
                let (sender, mut receiver) = tokio::sync::mpsc::channel(QUEUE);
                let read = read_blob(&blob[..], wanted, &sender);
                drop(sender);
                let all: Vec<_> = std::iter::from_fn(|| receiver.blocking_recv()).collect();
                let bytes: usize = all.iter().flatten().map(Bytes::len).sum();
                (read.is_ok(), all.iter().all(Result::is_ok), bytes)
            };
            assert_eq!(sent(&Digest::of(&blob)), (true, true, size));
            let held_back = (size.saturating_sub(1) / CHUNK) * CHUNK;
            assert_eq!(sent(&Digest::of(b"other")), (false, false, held_back));
        }
    }
}
