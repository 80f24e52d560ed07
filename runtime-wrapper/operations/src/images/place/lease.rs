//! Leases: which container may run as a name, and write the name's next checkpoint.
//!
//! A checkpoint that must run once is restored by one host at a time. The lease is the file `lease-NUMBER` with the
//! highest number beside the checkpoints. Its number is made by one host alone, as the file must be new, so a host that
//! takes a lease over makes the next. It can take one over that its holder has given back, or that is older than the
//! time limit by the place's own clock and stays for [`CONFIRMATION`] by its own: a clock may jump. Of a container of its
//! own host it knows more: that it exists, or does no longer.
//!
//! A process renews it while the container exists ([`super::renewal`]). So the limit bounds how long a lost host blocks a
//! name, and the number is the fence: a container that lost its lease writes no checkpoint any more.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use cryopod_host::files::read_bounded;
use cryopod_host::spec::Spec;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::run::operation;

use super::{Place, lock_file, make_locked, seconds, setting};

/// Whether one container of the name may run at a time, or `many`.
const COPIES: &str = "dev.cryopod.copies";
/// After how many seconds another host may take the lease over.
const LIMIT: &str = "dev.cryopod.lease_s";
/// What a container may set of its lease.
pub const SETTINGS: [&str; 2] = [COPIES, LIMIT];
const DEFAULT_LIMIT: u64 = 300;
/// No version writes a longer one.
const MAX_LIMIT: u64 = 604_800;
const FILE: &str = "lease-";
/// How a file beside the operations begins that notes the lease of a container of this host. The id follows.
const NOTE: &str = "lease-";
const MAX_BYTES: u64 = 4096;
const MAX_NOTE: u64 = 16 << 10;
const TRIES: usize = 5;
/// A lease may miss all renewals but one.
const RENEWALS: u32 = 3;
/// The longest time between two renewals.
const MAX_PERIOD: Duration = Duration::from_secs(10);
/// For the longest time, whoever takes over the lease of a lost host first sees it stay.
pub const CONFIRMATION: Duration = Duration::from_secs(20);

/// Who holds a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseHolder {
    host: String,
    boot: String,
    container: String,
    /// The low-level runtime's directory of the container, which exists as long as the container.
    directory: PathBuf,
    /// When its last start began, in nanoseconds since 1970: an engine starts a container again under the same id. 0: unknown.
    #[serde(default)]
    made_ns: u64,
    #[serde(default)]
    given_back: bool,
    /// How long the lease counts for those who would wait for less.
    #[serde(default)]
    limit_s: u64,
}

impl LeaseHolder {
    /// A container of this host.
    pub fn here(container: &str, directory: PathBuf) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            host: this_host(),
            boot: boot.trim().to_owned(),
            container: container.to_owned(),
            directory,
            made_ns: 0,
            given_back: false,
            limit_s: 0,
        }
    }

    /// A container of this host that is being made.
    pub fn new(container: &str, directory: PathBuf) -> Self {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Self {
            made_ns: now.as_nanos().try_into().unwrap_or(0),
            ..Self::here(container, directory)
        }
    }

    /// Returns a container of this host as its lease names it: the host's name may have changed since.
    pub fn noted(container: &str, directory: PathBuf) -> Self {
        let note = note_of(OsStr::new(container)).and_then(|note| read_note(&note));
        let noted = note.map(|(_, holder)| holder);
        noted
            .filter(|holder| holder.directory == directory)
            .unwrap_or_else(|| Self::here(container, directory))
    }

    fn is(&self, other: &Self) -> bool {
        let own = |h: &Self| (h.host.clone(), h.container.clone(), h.directory.clone());
        own(self) == own(other)
    }

    /// Returns true if it is the same container since its last start.
    fn is_still(&self, other: &Self) -> bool {
        let is_unknown = self.made_ns == 0 || other.made_ns == 0;
        self.is(other) && (is_unknown || self.made_ns == other.made_ns)
    }

    /// Returns true if this container of this host exists.
    pub fn is_here(&self) -> bool {
        self.directory.exists()
    }

    /// Returns true if it is a container of another host, which has not given the lease back.
    fn is_elsewhere(&self, me: &Self) -> bool {
        !self.given_back && !self.is(me) && self.exists(me).is_none()
    }

    /// Returns true if it is a container of this host, which `me` is on; `None`: of another one.
    fn exists(&self, me: &Self) -> Option<bool> {
        match self.boot == me.boot {
            _ if self.host != me.host => None,
            true => Some(self.is_here()),
            // Without an id of the machine, another one may have the name.
            false => self.host.contains(' ').then_some(false),
        }
    }
}

/// Returns this host's name and, if it has one, the machine's id.
pub(super) fn this_host() -> String {
    let name = nix::unistd::gethostname().unwrap_or_default();
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let host = format!("{} {id}", name.to_string_lossy());
    host.trim().to_owned()
}

/// Returns how long a lease of this container counts; `None`: it has none, as many copies may run.
pub fn limit(spec: &Spec) -> Result<Option<Duration>, String> {
    match setting(spec, COPIES).map(|set| set.value) {
        None | Some("one") => seconds(spec, LIMIT, DEFAULT_LIMIT).map(Some),
        Some("many") => Ok(None),
        Some(other) => Err(format!(
            "{COPIES}: {other:?} is neither \"one\" nor \"many\""
        )),
    }
}

/// Returns the time between two renewals of a lease.
pub fn period(limit: Duration) -> Duration {
    (limit / RENEWALS).min(MAX_PERIOD)
}

/// Returns the note's place for the lease of a container. Nobody has checked the id yet.
pub fn note_of(id: &OsStr) -> Option<PathBuf> {
    let id = id
        .to_str()
        .filter(|id| !id.is_empty() && !id.contains('/'))?;
    Some(operation::base().join(format!("{NOTE}{id}.json")))
}

/// Reads a note: the lease's place, and the container that holds it.
pub fn read_note(path: &Path) -> Option<(Place, LeaseHolder)> {
    serde_json::from_slice(&read_bounded(path, MAX_NOTE).ok()?).ok()
}

/// A lease that this process has taken. Another process of this host does not take the container for gone meanwhile.
#[derive(Debug)]
pub struct NameLease {
    lock: File,
}

impl NameLease {
    /// Returns the lock for another process: it holds as long as one of the two has it open.
    pub fn share(&self) -> io::Result<File> {
        self.lock.try_clone()
    }
}

impl Place {
    /// Returns the lease's file; in object storage its lock between processes of this host.
    fn lease(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{FILE}{number}"))
    }

    fn leases(&self) -> io::Result<Vec<u64>> {
        match self.objects()? {
            None => self.numbers(FILE),
            Some(objects) => objects.numbers(FILE),
        }
    }

    fn read_lease(&self, number: u64) -> io::Result<Vec<u8>> {
        match self.objects()? {
            None => read_bounded(&self.lease(number), MAX_BYTES),
            Some(objects) => objects.read_lease(&format!("{FILE}{number}"), MAX_BYTES),
        }
    }

    fn age_of_lease(&self, number: u64) -> io::Result<Duration> {
        match self.objects()? {
            None => self.age(&self.lease(number)),
            Some(objects) => objects.age_of_lease(&format!("{FILE}{number}")),
        }
    }

    /// Returns true if a process of this host makes the lease right now, as far as locks tell.
    fn is_being_made(&self, number: u64) -> io::Result<bool> {
        match lock_file(&self.lease(number)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.remote.is_some() => Ok(false),
            lock => lock.map(|lock| lock.is_none()),
        }
    }

    fn make_lease_file(&self, number: u64, text: &[u8]) -> io::Result<Option<File>> {
        let path = self.lease(number);
        if let Some(objects) = self.objects()? {
            // One may be left, of a bucket that was emptied.
            let lock = File::options().append(true).create(true).open(&path)?;
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Ok(None);
            }
            let made = objects.make_lease(&format!("{FILE}{number}"), text)?;
            return Ok(made.then_some(lock));
        }
        make_locked(&path, text)
    }

    fn remove_lease(&self, number: u64) {
        if let Ok(Some(objects)) = self.objects() {
            objects.remove_lease(&format!("{FILE}{number}"));
        }
        let _ = fs::remove_file(self.lease(number));
    }

    /// Returns the lease's name for messages.
    fn shown_lease(&self, number: u64) -> String {
        format!("{}/{FILE}{number}", self.shown())
    }

    /// Returns the lease that counts, with its holder if that can be read.
    fn held(&self) -> io::Result<Option<(u64, Option<LeaseHolder>)>> {
        let mut tries = TRIES;
        loop {
            let Some(number) = self.leases()?.pop() else {
                return Ok(None);
            };
            match self.read_lease(number) {
                Ok(text) => return Ok(Some((number, serde_json::from_slice(&text).ok()))),
                // Whoever has made the next one has removed it.
                Err(e) if e.kind() == io::ErrorKind::NotFound && tries > 0 => tries -= 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// Takes the lease of the name.
    ///
    /// # Errors
    /// Who holds it, or why the place cannot be used.
    pub fn take(&self, me: &LeaseHolder, limit: Duration) -> Result<NameLease, String> {
        self.take_confirmed(me, limit, CONFIRMATION)
    }

    fn take_confirmed(
        &self,
        me: &LeaseHolder,
        limit: Duration,
        longest: Duration,
    ) -> Result<NameLease, String> {
        let at = |e: io::Error| format!("{}: {e}", self.shown());
        self.make().map_err(at)?;
        if let Some(objects) = self.objects().map_err(at)? {
            objects.check_conditional_writes().map_err(at)?;
        }
        let me = &LeaseHolder {
            limit_s: limit.as_secs(),
            ..me.clone()
        };
        for _ in 0..TRIES {
            let held = self.held().map_err(at)?;
            if let Some((number, holder)) = &held
                && let Some(why) = self
                    .keeps(*number, holder.as_ref(), me, limit)
                    .map_err(at)?
            {
                return Err(why);
            }
            // A clock that jumps makes each lease old; one whose holder lives is renewed.
            if let Some((number, holder)) = &held
                && holder.as_ref().is_none_or(|holder| holder.is_elsewhere(me))
            {
                let said = holder.as_ref().map_or(MAX_LIMIT, |holder| holder.limit_s);
                let period = period(limit.max(Duration::from_secs(said)));
                if !self.stays(*number, longest.min(period * 2)).map_err(at)? {
                    continue;
                }
            }
            let number = held.map_or(0, |(number, _)| number) + 1;
            if let Some(lease) = self.make_lease(number, me).map_err(at)? {
                return Ok(lease);
            }
        }
        Err(format!("{}: others take it", self.shown()))
    }

    /// Returns true if the lease is still the one that counts after this time, by this host's clock.
    fn stays(&self, number: u64, time: Duration) -> io::Result<bool> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(500));
            if self.leases()?.pop() != Some(number) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns why a lease cannot be taken over.
    fn keeps(
        &self,
        number: u64,
        holder: Option<&LeaseHolder>,
        me: &LeaseHolder,
        limit: Duration,
    ) -> io::Result<Option<String>> {
        let age = self.age_of_lease(number)?;
        let Some(holder) = holder else {
            return Ok(self.keeps_unknown(number, age, limit));
        };
        let limit = limit.max(Duration::from_secs(holder.limit_s));
        // Not every server locks.
        let being_made = || self.is_being_made(number).unwrap_or(age < limit);
        let exists = holder.exists(me);
        let free = holder.given_back
            || holder.is(me)
            || match exists {
                // In this order: whoever makes it lets go when it is there.
                Some(_) => !being_made() && holder.exists(me) == Some(false),
                None => age >= limit,
            };
        let when = match exists {
            Some(_) => "when that container is deleted".to_owned(),
            None => format!("after {} s ({LIMIT})", limit.as_secs()),
        };
        let (container, by) = (&holder.container, &holder.host);
        Ok((!free).then(|| {
            format!(
                "it runs as container {container} on {by}, or did so {} s ago; others may take it over {when}, or if you remove {}",
                age.as_secs(),
                self.shown_lease(number)
            )
        }))
    }

    /// The same of a lease that cannot be read. It is whole from the first: another version has written it, or the disk is
    /// bad.
    fn keeps_unknown(&self, number: u64, age: Duration, limit: Duration) -> Option<String> {
        let text = self.read_lease(number).unwrap_or_default();
        let text = serde_json::from_slice::<Value>(&text).unwrap_or_default();
        let said = text.get("limit_s").and_then(Value::as_u64).unwrap_or(0);
        let limit = limit.max(Duration::from_secs(said.min(MAX_LIMIT)));
        (age < limit).then(|| {
            format!(
                "{} was written by another cryopod {} s ago, and this one cannot read it; others may take it over after {} s ({LIMIT}), or if you remove it",
                self.shown_lease(number),
                age.as_secs(),
                limit.as_secs()
            )
        })
    }

    /// Makes the lease of this number; `None`: another has made it, or a later one.
    fn make_lease(&self, number: u64, holder: &LeaseHolder) -> io::Result<Option<NameLease>> {
        let text = serde_json::to_vec(holder)?;
        let Some(lock) = self.make_lease_file(number, &text)? else {
            return Ok(None);
        };
        let all = self.leases();
        match all {
            Ok(all) if all.last() == Some(&number) => {
                for old in all.iter().filter(|n| **n < number) {
                    self.remove_lease(*old);
                }
                Ok(Some(NameLease { lock }))
            }
            other => {
                self.remove_lease(number);
                other.map(|_| None)
            }
        }
    }

    /// Checks the fence: returns who has taken the lease over from this container. `had`: it took one when it was made.
    pub fn taken_over(&self, me: &LeaseHolder, had: bool) -> io::Result<Option<String>> {
        Ok(match self.held()? {
            Some((_, Some(holder))) if holder.is_still(me) && !holder.given_back => None,
            Some((_, Some(holder))) if !had && holder.given_back => None,
            Some((_, holder)) => Some(holder.map_or("another host".into(), |h| h.host)),
            None => None,
        })
    }

    /// Gives the lease back, if this container has it.
    pub fn give_back(&self, me: &LeaseHolder) -> io::Result<()> {
        self.follow(me, true).map(drop)
    }

    /// Has the time limit of this container's lease begin anew: nobody takes it over while the checkpoint is written.
    /// Returns the lease that counts now; `None`: this container has none.
    pub fn renew(&self, me: &LeaseHolder) -> io::Result<Option<NameLease>> {
        self.follow(me, false)
    }

    fn follow(&self, me: &LeaseHolder, given_back: bool) -> io::Result<Option<NameLease>> {
        // The process that renews it, and one that gives it back, may meet.
        for _ in 0..TRIES {
            let (number, next) = match self.held()? {
                Some((number, Some(holder))) if holder.is_still(me) && !holder.given_back => {
                    let next = LeaseHolder {
                        given_back,
                        ..holder
                    };
                    (number + 1, next)
                }
                _ => return Ok(None),
            };
            if let Some(lease) = self.make_lease(number, &next)? {
                return Ok(Some(lease));
            }
        }
        Err(io::Error::other("others take each next number"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::SystemTime;

    const LONG: Duration = Duration::from_secs(300);

    fn place() -> (tempfile::TempDir, Place) {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("c1");
        (
            dir,
            Place {
                directory,
                remote: None,
            },
        )
    }

    fn take(place: &Place, me: &LeaseHolder, limit: Duration) -> Result<NameLease, String> {
        place.take_confirmed(me, limit, Duration::ZERO)
    }

    /// A container that exists.
    fn on(host: &str, container: &str) -> LeaseHolder {
        LeaseHolder {
            host: host.into(),
            boot: "b1".into(),
            container: container.into(),
            directory: "/".into(),
            made_ns: 0,
            given_back: false,
            limit_s: 0,
        }
    }

    fn renewed_at(place: &Place, time: SystemTime) {
        let (number, _) = place.held().unwrap().unwrap();
        let file = File::options().write(true).open(place.lease(number));
        file.unwrap().set_modified(time).unwrap();
    }

    fn older(place: &Place, by: Duration) {
        renewed_at(place, SystemTime::now() - by);
    }

    #[test]
    fn one_host_at_a_time() {
        let (_dir, place) = place();
        let (a, b) = (on("a", "1"), on("b", "2"));
        take(&place, &a, LONG).unwrap();
        let said = take(&place, &b, LONG).unwrap_err();
        assert!(said.contains("container 1 on a"), "{said}");
        // The same container begins again.
        take(&place, &a, LONG).unwrap();
        assert_eq!(place.taken_over(&a, true).unwrap(), None);
        place.give_back(&b).unwrap();
        assert!(
            take(&place, &b, LONG).is_err(),
            "it was not b's to give back"
        );
        place.give_back(&a).unwrap();
        take(&place, &b, LONG).unwrap();
        assert_eq!(place.taken_over(&a, true).unwrap().as_deref(), Some("b"));
        assert_eq!(place.numbers(FILE).unwrap().len(), 1);
    }

    #[test]
    fn what_is_left_of_a_container_gives_no_lease_of_its_next_start_back() {
        let (_dir, place) = place();
        let started = |made_ns| LeaseHolder {
            made_ns,
            ..on("a", "1")
        };
        take(&place, &started(1), LONG).unwrap();
        take(&place, &started(2), LONG).unwrap();
        place.give_back(&started(1)).unwrap();
        assert!(take(&place, &on("b", "2"), LONG).is_err());
        assert!(place.taken_over(&started(1), true).unwrap().is_some());
        assert!(place.taken_over(&started(2), true).unwrap().is_none());
        place.give_back(&started(2)).unwrap();
        take(&place, &on("b", "2"), LONG).unwrap();
    }

    #[test]
    fn a_lost_host_is_fenced() {
        let (_dir, place) = place();
        let (a, b) = (on("a", "1"), on("b", "2"));
        take(&place, &a, LONG).unwrap();
        older(&place, Duration::from_secs(299));
        assert!(take(&place, &b, LONG).is_err());
        older(&place, Duration::from_secs(301));
        assert_eq!(place.taken_over(&a, true).unwrap(), None, "nobody has yet");
        place.renew(&a).unwrap();
        assert!(take(&place, &b, LONG).is_err(), "its checkpoint is written");
        older(&place, Duration::from_secs(301));
        take(&place, &b, LONG).unwrap();
        assert_eq!(place.taken_over(&a, true).unwrap().as_deref(), Some("b"));
        place.give_back(&a).unwrap();
        assert!(take(&place, &a, LONG).is_err());
        place.give_back(&b).unwrap();
        assert_eq!(place.taken_over(&a, true).unwrap().as_deref(), Some("b"));
        assert_eq!(place.taken_over(&a, false).unwrap(), None);
    }

    #[test]
    fn a_lease_of_another_version_counts_as_long_as_any() {
        let (_dir, place) = place();
        let b = on("b", "2");
        for (text, limit) in [(r#"{"holder": {}, "limit_s": 900}"#, 900), ("{", 300)] {
            place.make().unwrap();
            fs::write(place.lease(7), text).unwrap();
            older(&place, Duration::from_secs(limit - 1));
            let said = take(&place, &b, LONG).unwrap_err();
            assert!(said.contains("written by another cryopod"), "{said}");
            older(&place, Duration::from_secs(limit + 1));
            take(&place, &b, LONG).unwrap();
            fs::remove_file(place.lease(8)).unwrap();
        }
    }

    #[test]
    fn a_clock_that_jumps_forth_frees_no_lease_that_is_renewed() {
        let (_dir, place) = place();
        let (a, b) = (on("a", "1"), on("b", "2"));
        take(&place, &a, LONG).unwrap();
        older(&place, Duration::from_secs(3600));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(700));
                place.renew(&a).unwrap();
            });
            let said = place.take_confirmed(&b, LONG, CONFIRMATION).unwrap_err();
            assert!(said.contains("on a"), "{said}");
        });
        older(&place, Duration::from_secs(3600));
        place
            .take_confirmed(&b, LONG, Duration::from_secs(1))
            .unwrap();
    }

    #[test]
    fn a_clock_that_jumps_back_frees_nothing() {
        let (_dir, place) = place();
        take(&place, &on("a", "1"), LONG).unwrap();
        renewed_at(&place, SystemTime::now() + Duration::from_secs(9000));
        assert!(take(&place, &on("b", "2"), LONG).is_err());
    }

    #[test]
    fn containers_of_this_host_that_are_no_more() {
        let (_dir, place) = place();
        let gone = LeaseHolder {
            directory: "/no/such".into(),
            ..on("a", "1")
        };
        let making = take(&place, &gone, LONG).unwrap();
        // Its directory comes later.
        assert!(take(&place, &on("a", "2"), LONG).is_err());
        drop(making);
        assert!(
            take(&place, &on("b", "2"), LONG).is_err(),
            "another host cannot tell"
        );
        take(&place, &on("a", "2"), LONG).unwrap();
        older(&place, Duration::from_secs(301));
        assert!(take(&place, &on("a", "3"), LONG).is_err(), "it exists");
        let rebooted = |host: &str| LeaseHolder {
            boot: "b2".into(),
            ..on(host, "3")
        };
        take(&place, &rebooted("b"), LONG).unwrap();
        assert!(
            take(&place, &on("b", "4"), LONG).is_err(),
            "another host b?"
        );
        let known = "b id-of-the-machine";
        place.give_back(&rebooted("b")).unwrap();
        take(&place, &rebooted(known), LONG).unwrap();
        take(&place, &on(known, "4"), LONG).unwrap();
    }

    #[test]
    fn many_at_once_one_wins() {
        let (_dir, place) = place();
        take(&place, &on("a", "1"), LONG).unwrap();
        older(&place, Duration::from_secs(301));
        let won = std::thread::scope(|scope| {
            let place = &place;
            let tries: Vec<_> = (0..8)
                .map(|i| scope.spawn(move || take(place, &on(&format!("h{i}"), "c"), LONG).is_ok()))
                .collect();
            tries
                .into_iter()
                .map(|t| t.join().unwrap())
                .filter(|won| *won)
                .count()
        });
        assert_eq!(won, 1);
    }

    #[test]
    fn copies() {
        let of = |copies: &str| limit(&Spec::from_json(json!({"annotations": {COPIES: copies}})));
        assert_eq!(of("one").unwrap(), Some(LONG));
        assert_eq!(of("many").unwrap(), None);
        assert!(of("two").unwrap_err().contains("neither"));
    }

    #[test]
    fn a_lease_counts_for_as_long_as_its_holder_renews_it() {
        let (_dir, place) = place();
        let (a, b) = (on("a", "1"), on("b", "2"));
        take(&place, &a, LONG).unwrap();
        place.renew(&a).unwrap();
        older(&place, Duration::from_secs(200));
        assert!(take(&place, &b, Duration::from_secs(30)).is_err());
        older(&place, Duration::from_secs(301));
        take(&place, &b, Duration::from_secs(30)).unwrap();
    }

    #[test]
    fn a_lease_is_whole_and_locked_as_soon_as_it_is_there() {
        let (_dir, place) = place();
        let (a, b) = (on("a", "1"), on("a", "2"));
        let reader = {
            let (place, a) = (place.clone(), a.clone());
            take(&place, &a, LONG).unwrap();
            std::thread::spawn(move || {
                for _ in 0..2000 {
                    assert_eq!(place.taken_over(&a, true).unwrap(), None);
                }
            })
        };
        for _ in 0..200 {
            place.renew(&a).unwrap();
        }
        reader.join().unwrap();
        // Its container does not exist yet, and will.
        let gone = LeaseHolder {
            directory: "/absent".into(),
            ..a
        };
        place.give_back(&on("a", "1")).unwrap();
        let lease = take(&place, &gone, LONG).unwrap();
        let shared = lease.share().unwrap();
        drop(lease);
        assert!(take(&place, &b, LONG).is_err());
        drop(shared);
        take(&place, &b, LONG).unwrap();
    }
}
