//! Reads and writes the objects of a place in object storage, `s3://BUCKET[/PREFIX]`.
//!
//! Credentials, region and endpoint are the `AWS_...` variables of the engine's environment, or lines `NAME=VALUE` in
//! [`VARIABLES`]: an engine passes few variables to its runtime. On a cloud's machine its metadata service is asked.

use std::fs::File;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::config::restore::bucket_and_prefix;
use cryopod_host::files::{if_there, read_bounded};
use nix::sys::signal::SigSet;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path as Key;
use object_store::prefix::PrefixStore;
use object_store::{
    ClientConfigKey, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig,
};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Has the variables that the engine's environment lacks. Root's alone.
const VARIABLES: &str = "/etc/cryopod/objects.env";
const MAX_VARIABLES: u64 = 64 << 10;
/// The size of the parts in which large files are sent and fetched. So many are in memory and under way at once.
const PART: u64 = 16 << 20;
const AT_ONCE: usize = 8;
/// The most parts of one object: S3's limit.
const MAX_PARTS: u64 = 10_000;
/// Of one request with its body: storage may take minutes to put a large object together from its parts (S3's manual of
/// CompleteMultipartUpload). Whoever sends or fetches has a limit of its own.
const REQUEST_LIMIT: Duration = Duration::from_secs(300);
/// Of all repetitions of a request.
const RETRY_LIMIT: Duration = Duration::from_secs(30);
/// Of a request for what is small, with its repetitions: a container may stand still meanwhile.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How often a transfer looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(50);

/// Tells whether a transfer is to stop.
pub type Stops<'a> = &'a dyn Fn() -> bool;

/// An object that is also a file of this host.
#[derive(Debug, Clone)]
pub struct Transfer {
    pub key: String,
    pub file: PathBuf,
    pub bytes: u64,
}

/// A place's objects. Keys are relative to its prefix.
#[derive(Debug)]
pub struct ObjectStorage {
    store: Arc<dyn ObjectStore>,
    /// Ends with the last transfer.
    runtime: Runtime,
}

impl ObjectStorage {
    /// Opens a place. Nothing is asked yet.
    ///
    /// # Errors
    /// The place's name or a variable is not understood.
    pub fn open(url: &str) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(ErrorKind::InvalidInput, why);
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (bucket, prefix) = bucket_and_prefix(url).map_err(invalid)?;
        let prefix = Key::parse(prefix).map_err(|e| invalid(e.to_string()))?;
        let seconds = |limit: Duration| format!("{} seconds", limit.as_secs());
        let [timeout, connect] = [ClientConfigKey::Timeout, ClientConfigKey::ConnectTimeout]
            .map(AmazonS3ConfigKey::Client);
        let mut builder = AmazonS3Builder::new()
            .with_config(timeout, seconds(REQUEST_LIMIT))
            .with_config(connect, seconds(CONNECT_LIMIT))
            .with_retry(RetryConfig {
                retry_timeout: RETRY_LIMIT,
                ..RetryConfig::default()
            });
        let own = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.to_str().filter(|name| name.starts_with("AWS_"))?;
            let key = name.to_ascii_lowercase().parse().ok()?;
            Some((key, value.into_string().ok()?))
        });
        for (key, value) in own {
            builder = builder.with_config(key, value);
        }
        for (key, value) in variables(Path::new(VARIABLES))? {
            builder = builder.with_config(key, value);
        }
        let store = builder.with_bucket_name(bucket).build();
        let store = store.map_err(|e| invalid(e.to_string()))?;
        Self::over(Arc::new(PrefixStore::new(store, prefix)))
    }

    pub(super) fn over(store: Arc<dyn ObjectStore>) -> io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).max_blocking_threads(AT_ONCE);
        // A thread that blocks no signals would end this process by one that the main thread waits for.
        let runtime = runtime.on_thread_start(|| {
            let _ = SigSet::all().thread_block();
        });
        let runtime = runtime.enable_all().build()?;
        Ok(Self { store, runtime })
    }

    /// Returns the names of the objects directly in a directory.
    pub fn names(&self, directory: &str) -> io::Result<Vec<String>> {
        let listed = self.list(directory)?;
        let names = listed.objects.iter().filter_map(|o| o.location.filename());
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the names of the directories in a directory; empty: of the place.
    pub fn directories(&self, directory: &str) -> io::Result<Vec<String>> {
        let listed = self.list(directory)?;
        let names = listed.common_prefixes.iter().filter_map(|p| p.filename());
        Ok(names.map(str::to_owned).collect())
    }

    fn list(&self, directory: &str) -> io::Result<object_store::ListResult> {
        let prefix = (!directory.is_empty()).then(|| Key::from(directory));
        let listed = self.store.list_with_delimiter(prefix.as_ref());
        self.answer(async { listed.await.map_err(error) })
    }

    /// Returns a small object.
    ///
    /// # Errors
    /// There is none ([`ErrorKind::NotFound`]), or it is larger than `most` bytes.
    pub fn read(&self, key: &str, most: u64) -> io::Result<Vec<u8>> {
        self.answer(async {
            let found = self.store.get(&Key::from(key)).await.map_err(error)?;
            if found.meta.size > most {
                let why = format!("{key}: more than {most} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, why));
            }
            Ok(found.bytes().await.map_err(error)?.into())
        })
    }

    /// Makes an object; false: there is one.
    pub fn create(&self, key: &str, text: &[u8]) -> io::Result<bool> {
        let text = PutPayload::from(text.to_vec());
        let made = self.answer(async {
            let key = Key::from(key);
            let put = self.store.put_opts(&key, text, PutMode::Create.into());
            put.await.map_err(error)
        });
        match made {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
            made => made.map(|_| true),
        }
    }

    /// Makes an object, or writes it anew.
    pub fn write(&self, key: &str, text: &[u8]) -> io::Result<()> {
        let text = PutPayload::from(text.to_vec());
        self.answer(async {
            let put = self.store.put(&Key::from(key), text).await;
            put.map(drop).map_err(error)
        })
    }

    /// Returns when an object was written, by the storage's clock.
    pub fn written(&self, key: &str) -> io::Result<SystemTime> {
        self.answer(async {
            let found = self.store.head(&Key::from(key)).await.map_err(error)?;
            Ok(found.last_modified.into())
        })
    }

    /// Removes an object, if there is one.
    pub fn remove(&self, key: &str) -> io::Result<()> {
        let removed =
            self.answer(async { self.store.delete(&Key::from(key)).await.map_err(error) });
        if_there(removed).map(drop)
    }

    /// Sends files. Each object is whole or absent.
    ///
    /// # Errors
    /// What could not be sent; [`ErrorKind::Interrupted`]: it was to stop.
    pub fn send(&self, files: &[Transfer], stops: Stops<'_>) -> io::Result<()> {
        self.transfer(files, stops, send)
    }

    /// Fetches objects into new files. A file that could not be fetched may be there in part.
    ///
    /// # Errors
    /// What could not be fetched; [`ErrorKind::Interrupted`]: it was to stop.
    pub fn fetch(&self, objects: &[Transfer], stops: Stops<'_>) -> io::Result<()> {
        self.transfer(objects, stops, fetch)
    }

    fn transfer<F>(
        &self,
        all: &[Transfer],
        stops: Stops<'_>,
        one: fn(Arc<dyn ObjectStore>, Arc<Semaphore>, Transfer) -> F,
    ) -> io::Result<()>
    where
        F: Future<Output = io::Result<()>> + Send + 'static,
    {
        let permits = Arc::new(Semaphore::new(AT_ONCE));
        self.wait(stops, async {
            // Dropped, it ends those that are under way.
            let mut running = JoinSet::new();
            for transfer in all {
                // Each has a file open.
                while running.len() >= AT_ONCE
                    && let Some(done) = running.join_next().await
                {
                    done.map_err(io::Error::other)??;
                }
                running.spawn(one(self.store.clone(), permits.clone(), transfer.clone()));
            }
            joined(&mut running).await
        })
    }

    /// Waits for a small answer.
    fn answer<T>(&self, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        self.runtime.block_on(async {
            let answered = tokio::time::timeout(ANSWER_LIMIT, work).await;
            answered.unwrap_or_else(|_| {
                let why = format!("no answer within {} s", ANSWER_LIMIT.as_secs());
                Err(io::Error::new(ErrorKind::TimedOut, why))
            })
        })
    }

    /// Waits for a transfer.
    fn wait<T>(
        &self,
        stops: Stops<'_>,
        work: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        self.runtime.block_on(async {
            let mut work = pin!(work);
            loop {
                if let Ok(done) = tokio::time::timeout(LOOK, work.as_mut()).await {
                    return done;
                }
                if stops() {
                    return Err(ErrorKind::Interrupted.into());
                }
            }
        })
    }
}

/// Reads the variables of a file that only root can read or write; none if it is not there.
fn variables(path: &Path) -> io::Result<Vec<(AmazonS3ConfigKey, String)>> {
    let invalid = |why: String| {
        let why = format!("{}: {why}", path.display());
        io::Error::new(ErrorKind::InvalidData, why)
    };
    let Some(meta) = if_there(path.symlink_metadata())? else {
        return Ok(Vec::new());
    };
    if meta.uid() != 0 || meta.mode() & 0o077 != 0 {
        return Err(invalid(
            "others can read it: chown root and chmod 600".into(),
        ));
    }
    let text = read_bounded(path, MAX_VARIABLES)?;
    let text = String::from_utf8(text).map_err(|e| invalid(e.to_string()))?;
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let read = |line: &str| {
        let (name, value) = line
            .split_once('=')
            .ok_or_else(|| invalid("a line is not NAME=VALUE".into()))?;
        let key = name.trim().to_ascii_lowercase().parse();
        let key = key.map_err(|_| invalid(format!("{name}: not a variable of S3")))?;
        Ok((key, value.trim().trim_matches(['"', '\'']).to_owned()))
    };
    lines.map(read).collect()
}

async fn joined(running: &mut JoinSet<io::Result<()>>) -> io::Result<()> {
    while let Some(done) = running.join_next().await {
        done.map_err(io::Error::other)??;
    }
    Ok(())
}

async fn send(
    store: Arc<dyn ObjectStore>,
    permits: Arc<Semaphore>,
    sent: Transfer,
) -> io::Result<()> {
    let key = Key::from(sent.key.as_str());
    let file = Arc::new(File::open(&sent.file)?);
    if sent.bytes <= PART {
        let _permit = permits.acquire_owned().await;
        let whole = part(file, 0, sent.bytes).await?;
        return store.put(&key, whole).await.map(drop).map_err(error);
    }
    let mut upload = store.put_multipart(&key).await.map_err(error)?;
    let sending = send_parts(upload.as_mut(), file, permits, sent.bytes).await;
    match sending {
        Ok(()) => upload.complete().await.map(drop).map_err(error),
        Err(e) => {
            let _ = upload.abort().await;
            Err(e)
        }
    }
}

async fn send_parts(
    upload: &mut dyn MultipartUpload,
    file: Arc<File>,
    permits: Arc<Semaphore>,
    bytes: u64,
) -> io::Result<()> {
    let size = PART.max(bytes.div_ceil(MAX_PARTS).next_multiple_of(1 << 20));
    let mut running = JoinSet::new();
    for at in (0..bytes).step_by(size as usize) {
        let permit = permits.clone().acquire_owned().await;
        let read = part(file.clone(), at, size.min(bytes - at)).await?;
        let sent = upload.put_part(read);
        running.spawn(async move {
            let _permit = permit;
            sent.await.map_err(error)
        });
        while let Some(done) = running.try_join_next() {
            done.map_err(io::Error::other)??;
        }
    }
    joined(&mut running).await
}

/// Reads a part of a file.
async fn part(file: Arc<File>, at: u64, bytes: u64) -> io::Result<PutPayload> {
    let read = move || {
        let mut read = vec![0; bytes as usize];
        file.read_exact_at(&mut read, at)?;
        Ok(PutPayload::from(read))
    };
    let read = tokio::task::spawn_blocking(read);
    read.await.map_err(io::Error::other)?
}

async fn fetch(
    store: Arc<dyn ObjectStore>,
    permits: Arc<Semaphore>,
    fetched: Transfer,
) -> io::Result<()> {
    let key = Key::from(fetched.key.as_str());
    let file = Arc::new(File::create_new(&fetched.file)?);
    file.set_len(fetched.bytes)?;
    let mut running = JoinSet::new();
    for at in (0..fetched.bytes).step_by(PART as usize) {
        let permit = permits.clone().acquire_owned().await;
        let (store, key, file) = (store.clone(), key.clone(), file.clone());
        let end = fetched.bytes.min(at + PART);
        running.spawn(async move {
            let _permit = permit;
            let part = store.get_range(&key, at..end).await.map_err(error)?;
            if part.len() as u64 != end - at {
                let why = format!("{key}: it has become shorter");
                return Err(io::Error::new(ErrorKind::InvalidData, why));
            }
            let write = move || file.write_all_at(&part, at);
            let written = tokio::task::spawn_blocking(write);
            written.await.map_err(io::Error::other)?
        });
        while let Some(done) = running.try_join_next() {
            done.map_err(io::Error::other)??;
        }
    }
    joined(&mut running).await
}

fn error(e: object_store::Error) -> io::Error {
    use object_store::Error::{
        AlreadyExists, NotFound, PermissionDenied, Precondition, Unauthenticated,
    };
    let kind = match &e {
        NotFound { .. } => ErrorKind::NotFound,
        AlreadyExists { .. } | Precondition { .. } => ErrorKind::AlreadyExists,
        PermissionDenied { .. } | Unauthenticated { .. } => ErrorKind::PermissionDenied,
        _ => ErrorKind::Other,
    };
    io::Error::new(kind, e)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn variables_are_roots_alone_and_known() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let of = |text: &str| {
            fs::write(file.path(), text).unwrap();
            variables(file.path())
        };
        let read = of("# S3\nAWS_ACCESS_KEY_ID = a\n\nAWS_REGION=\"b\"\n").unwrap();
        let read: Vec<_> = read.iter().map(|(k, v)| (k.as_ref(), v.as_str())).collect();
        assert_eq!(read, [("aws_access_key_id", "a"), ("aws_region", "b")]);
        for (text, want) in [
            ("AWS_KEY=a", "AWS_KEY: not a"),
            ("secret", "not NAME=VALUE"),
        ] {
            let said = of(text).unwrap_err().to_string();
            assert!(said.contains(want) && !said.contains("secret"), "{said}");
        }
        let open = fs::Permissions::from_mode(0o640);
        fs::set_permissions(file.path(), open).unwrap();
        assert!(of("").unwrap_err().to_string().contains("chmod 600"));
        assert!(variables(Path::new("/nonexistent")).unwrap().is_empty());
    }

    #[test]
    fn objects_are_made_once_and_large_files_come_back() {
        let storage = ObjectStorage::over(Arc::new(InMemory::new())).unwrap();
        assert!(storage.create("a/lease-1", b"x").unwrap());
        assert!(!storage.create("a/lease-1", b"y").unwrap());
        assert_eq!(storage.read("a/lease-1", 1).unwrap(), b"x");
        assert!(storage.read("a/lease-1", 0).is_err());
        let missing = storage.read("a/lease-2", 9).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let dir = tempfile::tempdir().unwrap();
        let sizes = [0, 7, PART, PART + 1, 3 * PART - 5];
        let transfer = |n: usize, name: &str| Transfer {
            key: format!("a/1/{n}"),
            file: dir.path().join(format!("{name}{n}")),
            bytes: sizes[n],
        };
        let sent: Vec<_> = (0..sizes.len()).map(|n| transfer(n, "sent")).collect();
        for file in &sent {
            let bytes: Vec<u8> = (0..file.bytes).map(|i| (i ^ (i >> 8)) as u8).collect();
            fs::write(&file.file, bytes).unwrap();
        }
        storage.send(&sent, &|| false).unwrap();
        let back: Vec<_> = (0..sizes.len()).map(|n| transfer(n, "back")).collect();
        storage.fetch(&back, &|| false).unwrap();
        for (sent, back) in sent.iter().zip(&back) {
            assert!(fs::read(&sent.file).unwrap() == fs::read(&back.file).unwrap());
        }
        assert_eq!(storage.names("a").unwrap(), ["lease-1"]);
        assert_eq!(storage.directories("a").unwrap(), ["1"]);
        assert_eq!(storage.directories("").unwrap(), ["a"]);
        storage.remove("a/lease-1").unwrap();
        assert!(storage.names("a").unwrap().is_empty());
    }

    #[test]
    fn what_is_to_stop_stops() {
        let storage = ObjectStorage::over(Arc::new(InMemory::new())).unwrap();
        let never = storage.wait(&|| true, std::future::pending::<io::Result<()>>());
        assert_eq!(never.unwrap_err().kind(), ErrorKind::Interrupted);
    }
}
