use super::*;
use crate::config::tenant::Tenant;
use cryopod_test_files::TestFiles;
use serde_json::json;

fn spec(annotations: serde_json::Value, env: &[&str]) -> Spec {
    Spec::from_json(json!({"annotations": annotations, "process": {"env": env}}))
}

#[test]
fn only_what_the_administrator_allows() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (inside, outside) = (root.join("allowed/c1"), root.join("other"));
    fs::create_dir_all(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    root.link("allowed/link", &outside);
    let allow = root.join("allowed");
    let ask = |path: &Path| allowed(path, &[&allow], || "not allowed".to_owned());
    assert_eq!(ask(&inside).unwrap(), inside);
    for (path, want) in [
        ("other", "not allowed"),
        ("allowed/../other", "no absolute path"),
        ("allowed/link", "a link there leads out"),
        ("allowed/none", "cannot be opened"),
    ] {
        let said = ask(&root.join(path)).unwrap_err();
        assert!(said.contains(want), "{path}: {said}");
    }
    assert!(ask(Path::new("c1")).is_err());
    let options: RestoreOptions =
        toml::from_str(&format!("allow = [{:?}]", allow.to_str().unwrap())).unwrap();
    for (by_variable, want) in [(false, Ok(())), (true, Err(()))] {
        let asker = Asker {
            tenant: &Tenant::Root,
            by_variable,
        };
        let request = PlaceRequest {
            place: inside.to_str().unwrap(),
            asker,
            options: &options,
            key: "checkpoint.allow",
        };
        assert_eq!(request.check().map_err(drop), want, "{by_variable}");
    }
}

#[test]
fn names_are_one_component_of_a_path() {
    let of = |annotations, env: &[&str]| name(&spec(annotations, env), "id1");
    assert_eq!(of(json!({}), &[]).unwrap(), "id1");
    for [namespace, pod, container] in POD {
        let pod = json!({namespace: "ns", pod: "web-0", container: "server"});
        assert_eq!(of(pod, &[]).unwrap(), "ns.web-0.server");
    }
    assert_eq!(of(json!({}), &["CRYOPOD_NAME=warm.3"]).unwrap(), "warm.3");
    let both = of(json!({NAME: "a"}), &["CRYOPOD_NAME=b"]);
    assert_eq!(both.unwrap(), "a");
    for bad in [
        "",
        ".",
        "..",
        "a/b",
        ".partial-1",
        "a b",
        "-a",
        &"a".repeat(MAX_NAME + 1),
    ] {
        assert!(of(json!({NAME: bad}), &[]).is_err(), "{bad}");
    }
}

#[test]
fn what_an_image_brings() {
    let of = |annotations, variable: &str| {
        let spec = spec(annotations, &[variable]);
        by_variable(&spec, &["dev.cryopod.grace_s"])
    };
    for variable in ["NAME", "COPIES", "LEASE_S", "GRACE_S"] {
        assert!(
            of(json!({}), &format!("CRYOPOD_{variable}=1")),
            "{variable}"
        );
    }
    assert!(!of(json!({NAME: "a"}), "CRYOPOD_NAME=b"));
}

#[test]
fn seconds_have_bounds() {
    let of = |text: &str| {
        seconds(
            &spec(json!({"dev.cryopod.x_s": text}), &[]),
            "dev.cryopod.x_s",
            7,
        )
    };
    assert_eq!(of("12").unwrap(), Duration::from_secs(12));
    for bad in ["0", "-1", "1.5", "", "604801", "99999999999999999999"] {
        assert!(of(bad).unwrap_err().contains("7 days"), "{bad}");
    }
    let unset = seconds(&spec(json!({}), &[]), "dev.cryopod.x_s", 7);
    assert_eq!(unset.unwrap(), Duration::from_secs(7));
}

fn place() -> (tempfile::TempDir, Place) {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().canonicalize().unwrap().join("c1");
    (
        dir,
        Place {
            directory,
            remote: None,
        },
    )
}

#[test]
fn a_checkpoint_is_complete_or_absent() {
    let (_dir, place) = place();
    assert!(place.numbers("").unwrap().is_empty());
    let first = place.begin().unwrap();
    first.path().put("pages-1.img", "");
    assert!(place.numbers("").unwrap().is_empty());
    // A second writer takes the next number, and leaves the first one's alone.
    let second = place.begin().unwrap();
    let path = second.path().to_owned();
    drop(second);
    assert!(!path.exists());
    assert!(first.path().join("pages-1.img").exists());
    assert!(
        place
            .begin()
            .is_ok_and(|third| third.path() != first.path())
    );
    let named = first.complete().unwrap();
    let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    assert!(
        !open
            .into_iter()
            .any(|path| path.starts_with(named.parent().unwrap()))
    );
    assert_eq!(fs::read_dir(&named).unwrap().count(), 1);
    assert_eq!(named, place.directory.join("000001"));
    assert!(named.join("pages-1.img").exists());
    assert_eq!(place.numbers("").unwrap(), [1]);
    assert_eq!(
        place.begin().unwrap().complete().unwrap(),
        place.directory.join("000002")
    );
}

#[test]
fn what_killed_writers_left() {
    let (_dir, place) = place();
    let killed = |number: u64, complete: bool, age: u64| {
        let path = place.partial(number);
        path.put(WRITER, lease::this_host());
        if complete {
            let file = File::create(path.join(names::METADATA)).unwrap();
            let then = SystemTime::now() - Duration::from_secs(age);
            file.set_modified(then).unwrap();
        }
    };
    killed(1, false, 0);
    killed(2, true, 3600);
    // Its writer may be about to rename it.
    killed(3, true, 0);
    let _writer = lock_file(&place.partial(3).join(WRITER)).unwrap();
    killed(4, false, 0);
    // Its writer has not locked it yet.
    fs::remove_file(place.partial(4).join(WRITER)).unwrap();
    for (number, age) in [(5, 3600), (6, 25 * 3600)] {
        killed(number, false, 0);
        place.partial(number).put(WRITER, "far");
        let then = SystemTime::now() - Duration::from_secs(age);
        let directory = File::open(place.partial(number)).unwrap();
        directory.set_modified(then).unwrap();
    }
    killed(7, true, 0);
    let next = place.begin().unwrap();
    assert!(place.complete(7).is_dir());
    assert!(place.partial(5).is_dir() && !place.partial(6).exists());
    assert!(place.partial(4).is_dir());
    assert!(!place.partial(1).exists());
    assert!(place.complete(2).is_dir() && !place.partial(2).exists());
    assert!(place.partial(3).is_dir());
    assert_eq!(next.path(), place.partial(8));
}

#[test]
fn a_damaged_checkpoint_gives_its_name_up_unless_it_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("c1");
    let place = Place {
        directory,
        remote: None,
    };
    for _ in 0..3 {
        let partial = place.begin().unwrap();
        partial.path().put(names::METADATA, "{}");
        partial.complete().unwrap();
    }
    let [newest, older, oldest] = &place.newest_first().unwrap()[..] else {
        panic!("there are three");
    };
    let used = prune::hold(older).unwrap();
    assert!(used.is_some());
    assert_eq!(place.set_aside(older), *older);
    assert!(place.set_aside(newest).ends_with(".damaged-000003"));
    assert_eq!(place.newest_first().unwrap(), std::slice::from_ref(oldest));
    let next = place.begin().unwrap().complete().unwrap();
    assert!(next.ends_with("000004"), "{next:?}");
}

#[test]
fn what_another_host_completes_is_no_success_of_this_one() {
    let dir = tempfile::tempdir().unwrap();
    let place = Place {
        directory: dir.path().canonicalize().unwrap().join("c1"),
        remote: None,
    };
    let (of_this_host, renamed_by_another) = (place.begin().unwrap(), place.begin().unwrap());
    fs::create_dir_all(of_this_host.to.join("another's")).unwrap();
    assert!(of_this_host.complete().is_err());
    fs::rename(&renamed_by_another.path, &renamed_by_another.to).unwrap();
    assert!(renamed_by_another.complete().is_ok());
}
