use super::*;

/// A bundle with large and small images, below a directory.
fn images() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("checkpoint");
    fs::create_dir(&images).unwrap();
    for (name, bytes) in [
        ("pages-1.img", 2 << 20),
        ("vram-0000.img", 1 << 20),
        ("vram-index.img", 2 << 20),
        ("pages-2.img", 10),
        ("inventory.img", 10),
    ] {
        fs::write(images.join(name), vec![1u8; bytes]).unwrap();
    }
    (dir, images)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn aside_only_where_it_was_asked_for_and_back() {
    let (dir, images) = images();
    let all = names(&images);
    assert_eq!(after_checkpoint(&images).unwrap(), 0);
    let away = dir.path().join(AWAY);
    std::os::unix::fs::symlink("/tmp", &away).unwrap();
    assert_eq!(
        after_checkpoint(&images).unwrap(),
        0,
        "a link is no request"
    );
    ask(&images).unwrap_err();
    fs::remove_file(&away).unwrap();
    let request = ask(&images).unwrap();
    assert_eq!(request.away(), away);
    before_checkpoint(&images).unwrap();
    assert_eq!(after_checkpoint(&images).unwrap(), 2);
    assert_eq!(names(&away), ["pages-1.img", "vram-0000.img"]);
    let error = ask(&images).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    before_restore(&images).unwrap();
    assert_eq!(names(&images), all);
    assert!(!away.exists());
}

#[test]
fn a_ticket_is_good_once_and_a_strangers_never() {
    let (dir, images) = images();
    let all = names(&images);
    let (desk, away) = (dir.path().join("desk"), dir.path().join("elsewhere"));
    fs::create_dir(&away).unwrap();
    assert_eq!(part(&images, &away).unwrap(), 2);
    let ticket = issue_at(&desk, &images, &away).unwrap();
    let text = fs::read_to_string(images.join(TICKET)).unwrap();
    // A map and places are not files of the checkpoint. Those in the images themselves are a stranger's.
    fs::write(away.join(MAP), "0=1").unwrap();
    fs::write(away.join(VRAM_PLACES), "{}").unwrap();
    assert!(!ticket.is_redeemed());
    let handed = redeem(&images, &desk).unwrap();
    assert!(ticket.is_redeemed());
    assert_eq!(handed.map.as_deref(), Some("0=1"));
    assert_eq!(handed.places.as_ref(), Some(&away));
    assert_eq!(names(&images), all);
    assert_eq!(names(&away), [VRAM_PLACES]);
    for name in [MAP, VRAM_PLACES] {
        fs::write(images.join(name), "0=7").unwrap();
        assert_eq!(redeem(&images, &desk).unwrap(), ImportGrant::default());
        fs::remove_file(images.join(name)).unwrap();
    }
    drop(ticket);
    assert!(names(&desk).is_empty());
    for text in [&text[..], "../../../../../../../../etc/pass", "short"] {
        fs::write(images.join(TICKET), text).unwrap();
        let error = redeem(&images, &desk).unwrap_err().to_string();
        assert!(error.contains("import the archive itself"), "{error}");
    }
    fs::remove_file(images.join(TICKET)).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", images.join(TICKET)).unwrap();
    redeem(&images, &desk).unwrap_err();
}

#[test]
fn nobody_asks_any_more() {
    let (dir, images) = images();
    let all = names(&images);
    let away = dir.path().join(AWAY);
    // Killed before the checkpoint: nothing is moved.
    drop(ask(&images).unwrap());
    assert_eq!(after_checkpoint(&images).unwrap(), 0);
    assert_eq!(names(&images), all);
    // Killed after it: the next checkpoint, and the next export, find all files in place.
    for next in [
        before_checkpoint as fn(&Path) -> io::Result<()>,
        |images| ask(images).map(drop),
        |images| before_restore(images).map(drop),
    ] {
        let request = ask(&images).unwrap();
        assert_eq!(after_checkpoint(&images).unwrap(), 2);
        drop(request);
        next(&images).unwrap();
        assert_eq!(names(&images), all);
        assert!(!away.exists() || names(&away).is_empty());
    }
}

#[test]
fn what_cannot_be_moved_is_where_it_was() {
    let (dir, images) = images();
    let all = names(&images);
    let _request = ask(&images).unwrap();
    let away = dir.path().join(AWAY);
    // One of two cannot be moved: a directory has its name.
    fs::create_dir_all(away.join("pages-1.img/x")).unwrap();
    let error = after_checkpoint(&images).unwrap_err().to_string();
    assert!(error.contains("pages-1.img"), "{error}");
    // The directory replaced no file: all files still exist.
    assert_eq!(names(&images), all);
    assert!(error.contains("could not be moved back"), "{error}");
    assert!(error.contains(&images.display().to_string()), "{error}");
}

#[test]
fn to_another_file_system() {
    let away = tempfile::tempdir_in("/dev/shm").unwrap();
    let images = tempfile::tempdir_in("/var/tmp").unwrap();
    let (from, to) = (away.path().join("a.img"), images.path().join("a.img"));
    let differ =
        |a: &Path, b: &Path| fs::metadata(a).unwrap().dev() != fs::metadata(b).unwrap().dev();
    assert!(differ(away.path(), images.path()));
    let whole = vec![7u8; 3 << 20];
    fs::write(&from, &whole).unwrap();
    // After any failure the file is complete here; there, nothing or the old file exists.
    fs::write(&to, "old").unwrap();
    let mut full = |_: &mut File, to: &mut File| {
        io::Write::write_all(to, &[1; 1000])?;
        Err(io::ErrorKind::StorageFull.into())
    };
    let error = over(&from, &to, &mut full).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().contains("a.img"), "{error}");
    let error = over(&from, &to, &mut |_, _| Ok(5)).unwrap_err().to_string();
    assert!(error.contains("5 bytes instead of 3145728"), "{error}");
    assert_eq!(fs::read(&from).unwrap(), whole);
    assert_eq!(fs::read(&to).unwrap(), b"old");
    assert_eq!(names(images.path()), ["a.img"]);
    // A link there is replaced and not followed; a leftover of a killed process does no harm.
    let other = images.path().join("other");
    fs::write(&other, "kept").unwrap();
    fs::remove_file(&to).unwrap();
    std::os::unix::fs::symlink(&other, &to).unwrap();
    std::os::unix::fs::symlink(&other, images.path().join(".a.img.cryopod-partial")).unwrap();
    assert_eq!(join(away.path(), images.path()).unwrap(), 1);
    assert!(fs::symlink_metadata(&to).unwrap().is_file());
    assert_eq!(fs::read(&to).unwrap(), whole);
    assert_eq!(fs::read(&other).unwrap(), b"kept");
    assert_eq!(names(images.path()), ["a.img", "other"]);
    assert!(names(away.path()).is_empty());
    // Not a file.
    fs::create_dir(away.path().join("directory")).unwrap();
    join(away.path(), images.path()).unwrap_err();
    assert!(away.path().join("directory").exists());
}

#[test]
fn tickets_of_the_dead() {
    let (dir, images) = images();
    let (desk, away) = (dir.path().join("desk"), dir.path().join("scratch/away"));
    fs::create_dir_all(&away).unwrap();
    let killed = issue_at(&desk, &images, &away).unwrap();
    let other = issue_at(&desk, &images, dir.path()).unwrap();
    std::mem::forget(killed);
    revoke_at(&desk, &dir.path().join("scratch"));
    assert_eq!(names(&desk).len(), 1);
    assert!(fs::symlink_metadata(&other.link).is_ok());
    // A ticket to a missing directory gives a clear error.
    let gone = issue_at(&desk, &images, &dir.path().join("gone")).unwrap();
    let error = redeem(&images, &desk).unwrap_err().to_string();
    assert!(error.contains("import the archive itself"), "{error}");
    drop(gone);
}
