use super::*;
use crate::images::place::copies::FetchOutcome;
use crate::images::place::lease::LeaseHolder;
use crate::images::place::objects::name_and_number;
use cryopod_archive::metadata::{Metadata, MetadataSlot};
use object_store::memory::InMemory;
use std::time::Duration;
use tempfile::TempDir;

const NEVER: Stops<'static> = &|| false;

/// A host, which has its own directory of the place.
struct OneHost {
    directory: TempDir,
    remote: RemotePlace,
}

impl OneHost {
    fn of(store: &Arc<InMemory>) -> Self {
        let remote = RemotePlace::new("s3://jobs/team");
        let storage = ObjectStorage::over(store.clone()).unwrap();
        assert!(remote.opened.set(storage).is_ok());
        let directory = tempfile::tempdir().unwrap();
        Self { directory, remote }
    }

    fn place(&self, name: &str) -> Place {
        let root = self.directory.path().canonicalize().unwrap();
        Place {
            directory: root.join(name),
            remote: Some(self.remote.clone()),
        }
    }
}

/// Writes a checkpoint of one file, and builds it upon another.
fn write(place: &Place, text: &str) -> PartialCheckpoint {
    let partial = place.begin().unwrap();
    fs::write(partial.path().join("pages-1.img"), text).unwrap();
    let slot = MetadataSlot::reserve(partial.path()).unwrap();
    let metadata = Metadata {
        schema: Metadata::current_schema(),
        ..Metadata::default()
    };
    slot.commit(&metadata).unwrap();
    partial
}

fn complete(place: &Place, text: &str) -> PathBuf {
    let partial = write(place, text);
    let sent = place.send(&partial, NEVER).unwrap();
    place.publish(&partial, sent).unwrap();
    partial.complete().unwrap()
}

fn numbers(found: &[PathBuf]) -> Vec<&str> {
    let names = found.iter().filter_map(|path| path.file_name()?.to_str());
    names.map(|name| name.trim_start_matches('0')).collect()
}

#[test]
fn what_one_host_sends_another_fetches() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    complete(&a.place("job"), "first");
    let second = complete(&a.place("job"), "second");
    let there = b.place("job").newest_first().unwrap();
    assert_eq!(numbers(&there), ["2", "1"]);
    assert!(!there[0].exists());
    let place = b.place("job");
    assert_eq!(place.fetch(&there[0], NEVER), Ok(FetchOutcome::Fetched));
    assert_eq!(
        place.fetch(&there[0], NEVER),
        Ok(FetchOutcome::Here),
        "it is here"
    );
    let fetched = fs::read(there[0].join("pages-1.img")).unwrap();
    assert_eq!(fetched, b"second");
    assert!(place.discard_copy(&there[0]) && !there[0].exists());
    // The next number is another host's, too.
    let third = complete(&place, "third");
    assert_eq!(numbers(&[third]), ["3"]);
    a.place("job").completed_there(&second, Some(2)).unwrap();
    let left = a.place("job").newest_first().unwrap();
    assert_eq!(numbers(&left), ["3", "2"]);
    let gone = b.place("job").fetch(&place.complete(1), NEVER);
    assert_eq!(gone, Ok(FetchOutcome::Gone));
}

#[test]
fn what_is_not_sent_is_this_hosts_alone() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    let place = a.place("job");
    drop(write(&place, "its container was killed"));
    let here = place.newest_first().unwrap();
    assert_eq!(numbers(&here), ["1"]);
    assert_eq!(place.fetch(&here[0], NEVER), Ok(FetchOutcome::Here));
    assert!(!place.discard_copy(&here[0]), "there is no other");
    assert!(b.place("job").newest_first().unwrap().is_empty());
    let partial = write(&place, "its container went on");
    place.send(&partial, NEVER).unwrap();
    partial.discard();
    drop(partial);
    assert_eq!(numbers(&place.newest_first().unwrap()), ["1"]);
    let next = complete(&b.place("job"), "next");
    assert_eq!(numbers(&[next]), ["3"], "what is under way stays apart");
    let objects = place.objects().unwrap().unwrap();
    let left = objects.storage.directories("job").unwrap();
    assert_eq!(left, ["000002", "000003"], "for a day");
}

#[test]
fn what_others_build_upon_stays() {
    let store = Arc::new(InMemory::new());
    let host = OneHost::of(&store);
    let (place, other) = (host.place("job"), host.place("other"));
    complete(&place, "first");
    let upon = complete(&other, "upon");
    let objects = place.objects().unwrap().unwrap();
    let of_other = other.objects().unwrap().unwrap();
    let need = of_other.need(1, "job/000001").unwrap();
    objects.storage.write(&need, b"").unwrap();
    let second = complete(&place, "second");
    place.completed_there(&second, Some(1)).unwrap();
    assert_eq!(numbers(&place.newest_first().unwrap()), ["2", "1"]);
    place.set_aside_there(1).unwrap();
    assert_eq!(numbers(&place.newest_first().unwrap()), ["2"]);
    assert!(objects.is_there(COMPLETE, 1).unwrap(), "another needs it");
    assert_eq!(objects.sound().unwrap(), [2], "no other builds upon it");
    // A killed process's claim, and a mark of one that was killed while it removed the other.
    objects.storage.write("job/removing-000009", b"").unwrap();
    of_other.remove(1).unwrap();
    place.completed_there(&second, Some(1)).unwrap();
    assert_eq!(numbers(&place.newest_first().unwrap()), ["2"]);
    let left = objects.storage.names("job").unwrap();
    assert_eq!(left, ["complete-000002", "damaged-000001"]);
    place.set_aside_there(2).unwrap();
    assert!(place.newest_first().unwrap().is_empty());
    assert_eq!(place.last_there().unwrap(), 2);
    drop(upon);
}

#[test]
fn one_host_has_the_lease() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    let limit = Duration::from_secs(300);
    let of = |host: &str| -> LeaseHolder {
        let holder =
            serde_json::json!({"host": host, "boot": "b", "container": "c", "directory": "/"});
        serde_json::from_value(holder).unwrap()
    };
    let (on_a, on_b) = (of("a"), of("b"));
    let lease = a.place("job").take(&on_a, limit).unwrap();
    let said = b.place("job").take(&on_b, limit).unwrap_err();
    assert!(said.contains("container c on a"), "{said}");
    assert!(said.contains("remove s3://jobs/team/job/lease-1"), "{said}");
    a.place("job").renew(&on_a).unwrap();
    assert_eq!(b.place("job").taken_over(&on_a, true).unwrap(), None);
    a.place("job").give_back(&on_a).unwrap();
    drop(lease);
    b.place("job").take(&on_b, limit).unwrap();
    let taken = a.place("job").taken_over(&on_a, true).unwrap();
    assert_eq!(taken.as_deref(), Some("b"));
}

#[test]
fn a_listing_names_files_of_its_checkpoint_alone() {
    let listing = |name: &str, version: u64| {
        let files = serde_json::json!([{"name": name, "bytes": 1}]);
        let text = serde_json::json!({"version": version, "files": files, "upon": null});
        ObjectListing::parse("job/complete-000001", text.to_string().as_bytes())
    };
    assert!(listing("pages-1.img", 1).is_ok());
    for bad in ["", ".unsent", "..", "../x", "a/b", "/etc/passwd"] {
        let said = listing(bad, 1).unwrap_err().to_string();
        assert!(said.contains("is no name of a file"), "{said}");
    }
    assert!(listing("a", 2).unwrap_err().to_string().contains("update"));
    for bad in ["a", "a/", "/1", "a/b/1", "../1", "a/1x", ".a/1"] {
        assert_eq!(name_and_number(bad), None, "{bad}");
    }
    assert_eq!(name_and_number("web-1/000012"), Some(("web-1", 12)));
}

#[test]
fn what_is_damaged_there_is_told_and_what_was_made_anew_is_fetched_anew() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    complete(&a.place("job"), "old");
    let place = b.place("job");
    let first = place.complete(1);
    assert_eq!(place.fetch(&first, NEVER), Ok(FetchOutcome::Fetched));
    // Another one of this number, in a place that was emptied.
    let objects = place.objects().unwrap().unwrap();
    objects.storage.remove("job/complete-000001").unwrap();
    let c = OneHost::of(&store);
    complete(&c.place("job"), "a new one");
    assert_eq!(place.fetch(&first, NEVER), Ok(FetchOutcome::Fetched));
    assert_eq!(fs::read(first.join("pages-1.img")).unwrap(), b"a new one");
    objects.storage.remove("job/000001/pages-1.img").unwrap();
    assert_eq!(place.fetch(&first, NEVER), Ok(FetchOutcome::Here));
    assert!(place.discard_copy(&first));
    let told = place.fetch(&first, NEVER).unwrap();
    assert!(matches!(told, FetchOutcome::Damaged(why) if why.contains("job/000001")));
    assert!(!first.exists());
    let left = fs::read_dir(first.parent().unwrap()).unwrap().flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert_eq!(left, [".fetching"], "no half of one");
}

#[test]
fn a_checkpoint_that_was_published_keeps_its_files() {
    let store = Arc::new(InMemory::new());
    let host = OneHost::of(&store);
    let place = host.place("job");
    let partial = write(&place, "sent");
    let sent = place.send(&partial, NEVER).unwrap();
    let objects = place.objects().unwrap().unwrap();
    // The first of two requests came through, whose answer was lost.
    let text = serde_json::to_vec(sent.as_ref().unwrap()).unwrap();
    objects.storage.write("job/complete-000001", &text).unwrap();
    place.publish(&partial, sent).unwrap();
    partial.complete().unwrap();
    let partial = write(&place, "another's");
    let sent = place.send(&partial, NEVER).unwrap();
    objects
        .storage
        .write("job/complete-000002", b"other")
        .unwrap();
    assert!(place.publish(&partial, sent).is_err());
    partial.discard();
    drop(partial);
    let files = objects.storage.names("job/000002").unwrap();
    assert!(files.contains(&"pages-1.img".to_owned()), "{files:?}");
}

#[test]
fn what_may_be_built_upon_stays_as_long() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    let first = complete(&a.place("web-1"), "first");
    let partial = b.place("web-2").begin().unwrap();
    let chosen = copies::parent_of_partial(partial.path()).unwrap().unwrap();
    assert_eq!(chosen, b.place("web-1").complete(1));
    assert!(chosen.join(".tables-only").exists());
    let second = complete(&a.place("web-1"), "second");
    let place = a.place("web-1");
    place.completed_there(&second, Some(1)).unwrap();
    assert_eq!(numbers(&place.newest_first().unwrap()), ["2", "1"]);
    drop(partial);
    place.completed_there(&second, Some(1)).unwrap();
    assert_eq!(numbers(&place.newest_first().unwrap()), ["2"]);
    // This host's copy is not chosen when it is gone there.
    assert!(first.exists() && chosen.exists());
    let partial = b.place("web-2").begin().unwrap();
    let chosen = copies::parent_of_partial(partial.path()).unwrap().unwrap();
    assert_eq!(chosen, b.place("web-1").complete(2));
}

#[test]
fn what_was_not_sent_is_restored_upon_what_it_needs() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    complete(&a.place("web-1"), "first");
    let place = b.place("web-2");
    drop(write(&place, "its container was killed"));
    let here = place.newest_first().unwrap();
    let parent = b.place("web-1").complete(1);
    assert!(parent.join(".tables-only").exists());
    assert_eq!(place.fetch(&here[0], NEVER), Ok(FetchOutcome::Fetched));
    assert!(!parent.join(".tables-only").exists());
    assert_eq!(fs::read(parent.join("pages-1.img")).unwrap(), b"first");
    let held = crate::images::place::prune::hold(&parent).unwrap();
    assert!(!place.discard_copy(&here[0]), "somebody uses it");
    drop(held);
    assert!(place.discard_copy(&here[0]) && !parent.exists() && here[0].exists());
}

#[test]
fn what_a_newer_version_wrote_is_no_damage_and_what_is_damaged_there_is_set_aside() {
    let store = Arc::new(InMemory::new());
    let host = OneHost::of(&store);
    let place = host.place("job");
    complete(&place, "first");
    let objects = place.objects().unwrap().unwrap();
    let newer = br#"{"version": 2}"#;
    objects.storage.write("job/complete-000002", newer).unwrap();
    let said = place.fetch(&place.complete(2), NEVER).unwrap_err();
    assert!(said.contains("update cryopod"), "{said}");
    objects.storage.write("job/complete-000002", b"{").unwrap();
    let told = place.fetch(&place.complete(2), NEVER).unwrap();
    assert!(matches!(told, FetchOutcome::Damaged(_)));
    let aside = place.set_aside(&place.complete(2));
    assert_eq!(aside, Path::new("s3://jobs/team/job/000002"));
    assert_eq!(numbers(&place.newest_first().unwrap()), ["1"]);
}

#[test]
fn what_builds_upon_a_damaged_one_is_no_parent() {
    let store = Arc::new(InMemory::new());
    let host = OneHost::of(&store);
    let place = host.place("job");
    complete(&place, "first");
    complete(&place, "second");
    let objects = place.objects().unwrap().unwrap();
    let mut listing = objects.listing(2).unwrap();
    listing.upon = Some("job/000001".into());
    let text = serde_json::to_vec(&listing).unwrap();
    objects.storage.write("job/complete-000002", &text).unwrap();
    objects
        .storage
        .write("job/needed-000001-by-job-000002", b"")
        .unwrap();
    let parent = |partial: &PartialCheckpoint| copies::parent_of_partial(partial.path()).unwrap();
    let partial = place.begin().unwrap();
    assert_eq!(parent(&partial), Some(place.complete(2)));
    drop(partial);
    place.set_aside_there(1).unwrap();
    assert_eq!(objects.sound().unwrap(), [2], "itself it is sound");
    let partial = place.begin().unwrap();
    assert_eq!(parent(&partial), None);
    // Its need is given up.
    let needs = objects.storage.names("job").unwrap();
    assert!(
        !needs.iter().any(|name| name.starts_with("needed-000002")),
        "{needs:?}"
    );
}

#[test]
fn the_number_of_a_complete_checkpoint_is_not_claimed() {
    let store = Arc::new(InMemory::new());
    let (a, b) = (OneHost::of(&store), OneHost::of(&store));
    complete(&a.place("job"), "first");
    // This host looked for the next number before that.
    let place = b.place("job");
    place.make().unwrap();
    let partial = place.partial(1);
    fs::create_dir(&partial).unwrap();
    assert!(!place.claim(1, &partial).unwrap());
    let objects = place.objects().unwrap().unwrap();
    assert!(objects.numbers(WRITING).unwrap().is_empty());
    assert!(place.claim(2, &partial).unwrap());
    assert!(!place.claim(2, &partial).unwrap(), "it is claimed");
}
