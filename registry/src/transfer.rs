//! Shared parts of push and pull: a runtime, stall detection, retries.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Error;

/// Runs a future to its end on this thread.
pub(crate) fn run<T>(
    future: impl Future<Output = Result<T, Error>>,
    image: &str,
) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::Step {
            image: image.into(),
            step: "starting".into(),
            reason: e.to_string(),
        })?;
    let done = runtime.block_on(future);
    // Does not wait for a read that hangs (a dead network file system).
    runtime.shutdown_background();
    done
}

/// Bytes transferred so far.
pub(crate) type Flow = Arc<AtomicU64>;

/// Runs a transfer as long as bytes flow.
///
/// # Errors
/// The transfer's own, or `None` if nothing has flowed for `limit`.
pub(crate) async fn while_flowing<T>(
    future: impl Future<Output = T>,
    flow: &Flow,
    limit: Duration,
) -> Option<T> {
    let mut future = pin!(future);
    let mut before = flow.load(Ordering::Relaxed);
    loop {
        match tokio::time::timeout(limit, &mut future).await {
            Ok(done) => return Some(done),
            Err(_) => {
                let now = flow.load(Ordering::Relaxed);
                if now == before {
                    return None;
                }
                before = now;
            }
        }
    }
}

/// Tries up to `tries` times, with growing pauses. Does not retry permanent errors.
pub(crate) async fn with_tries<T, F: Future<Output = Result<T, Error>>>(
    tries: u32,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Error> {
    let mut pause = Duration::from_secs(1);
    let mut left = tries.max(1);
    loop {
        left -= 1;
        match attempt().await {
            Err(error @ (Error::Step { .. } | Error::Connect { .. })) if left > 0 => {
                tracing::warn!(%error, "trying again");
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            done => return done,
        }
    }
}
