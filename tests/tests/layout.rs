//! The layout of the source: no import circles between the modules of a crate, arrows between crates go down, and no
//! crate depends on a program.

#![allow(clippy::unwrap_used, reason = "tests report by failing")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates, from the leaves up: each may depend on those before it. Those of the second list are programs or
/// libraries that other programs load; nothing depends on them.
const LIBRARIES: [(&str, &str); 8] = [
    ("cryopod-host", "host"),
    ("cryopod-archive", "archive"),
    ("cryopod-registry", "registry"),
    ("cryopod-preload-wire", "preload/wire"),
    ("cryopod-cuda", "gpu-hooks/cuda"),
    ("cryopod-gpu-plan", "gpu-hooks/plan"),
    ("cryopod-amd", "gpu-hooks/amd"),
    ("cryopod-operations", "runtime-wrapper/operations"),
];
const PROGRAMS: [(&str, &str); 5] = [
    ("cryopod-preload", "preload"),
    ("cryopod-criu-plugin", "gpu-hooks/plugin"),
    ("cryopod-runtime", "runtime-wrapper"),
    ("cryopod", "cli"),
    ("cryopod-shim", "shim"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" && name != "bin" {
            sources(&path, found);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// The source without its comments and without the unit tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let lines = text.lines().filter(|l| !l.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// A module, by the names from the crate's root: `["vram", "read"]`.
type Module = Vec<String>;
/// Which of the modules in one folder names which other.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Reads a path or a tree of paths, `a::{b, c::d}`, and adds each to `found`. Returns the rest of the text.
fn paths<'a>(text: &'a str, before: &[&'a str], found: &mut Vec<Vec<&'a str>>) -> &'a str {
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
            if rest.is_empty() || rest.starts_with('}') {
                return rest.get(1..).unwrap_or_default();
            }
            let after = paths(rest, before, found);
            // A star or the like.
            let step = rest.chars().next().map_or(0, char::len_utf8);
            rest = if after.len() == rest.len() {
                &rest[step..]
            } else {
                after
            };
            if let Some(renamed) = rest.trim_start().strip_prefix("as ") {
                rest = renamed.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    let (word, rest) = text.split_at(end.unwrap_or(text.len()));
    let mut path = before.to_vec();
    path.extend((!word.is_empty()).then_some(word));
    match rest.strip_prefix("::").filter(|_| !word.is_empty()) {
        Some(rest) => paths(rest, &path, found),
        None => {
            found.push(path);
            rest
        }
    }
}

/// The modules of a crate, with the code of each.
fn modules(src: &Path) -> BTreeMap<Module, String> {
    let mut files = Vec::new();
    sources(src, &mut files);
    let mut found = BTreeMap::new();
    for file in files {
        let path = file.strip_prefix(src).unwrap().with_extension("");
        let mut module: Module = (path.iter())
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        if module
            .last()
            .is_some_and(|n| ["mod", "lib", "main"].contains(&n.as_str()))
        {
            module.pop();
        }
        found.insert(module, code(&file));
    }
    found
}

/// The module that a path names, seen from `from`.
fn resolved(from: &[String], path: &[&str], all: &BTreeMap<Module, String>) -> Module {
    let mut at = from.to_vec();
    for word in path {
        match *word {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            name => {
                at.push(name.to_owned());
                if !all.keys().any(|module| module.starts_with(&at)) {
                    at.pop();
                    break;
                }
            }
        }
    }
    at
}

/// For each folder of modules, which of them names which other, itself or by a module in it.
fn imports(src: &Path) -> BTreeMap<Module, Imports> {
    let all = modules(src);
    let mut found = BTreeMap::<Module, Imports>::new();
    for (module, text) in &all {
        for start in ["crate::", "super::", "self::"] {
            for (at, _) in text.match_indices(start) {
                let before = text[..at].chars().next_back();
                if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                    continue;
                }
                let mut named = Vec::new();
                paths(&text[at..], &[], &mut named);
                for path in named {
                    let other = resolved(module, &path, &all);
                    let same = module
                        .iter()
                        .zip(&other)
                        .take_while(|(a, b)| a == b)
                        .count();
                    if let (Some(own), Some(other)) = (module.get(same), other.get(same)) {
                        let folder = found.entry(module[..same].to_vec()).or_default();
                        folder.entry(own.clone()).or_default().insert(other.clone());
                    }
                }
            }
        }
    }
    found
}

/// The modules that are part of a circle: those from which a way leads back to themselves.
fn circles(imports: &Imports) -> Vec<String> {
    let comes_back = |from: &String| {
        let mut seen = BTreeSet::new();
        let mut next: Vec<&String> = imports[from].iter().collect();
        while let Some(module) = next.pop() {
            if module == from {
                return true;
            }
            if seen.insert(module) {
                next.extend(imports.get(module).into_iter().flatten());
            }
        }
        false
    };
    imports.keys().filter(|m| comes_back(m)).cloned().collect()
}

/// A folder is a room: so many modules at the most.
const ROOM: usize = 15;
/// Lines of a file.
const LONGEST: usize = 700;

#[test]
fn folders_are_rooms_and_files_are_short() {
    let mut wrong = Vec::new();
    for (name, directory) in LIBRARIES.iter().chain(&PROGRAMS) {
        let src = root().join(directory).join("src");
        let mut rooms = BTreeMap::<Vec<String>, usize>::new();
        for module in modules(&src).keys().filter(|module| !module.is_empty()) {
            *rooms
                .entry(module[..module.len() - 1].to_vec())
                .or_default() += 1;
        }
        let full = rooms.iter().filter(|(_, count)| **count > ROOM);
        wrong.extend(
            full.map(|(room, count)| format!("{name}, {}: {count} modules", room.join("/"))),
        );
        let mut files = Vec::new();
        sources(&src, &mut files);
        for file in files {
            let lines = fs::read_to_string(&file).unwrap().lines().count();
            if lines > LONGEST {
                wrong.push(format!("{}: {lines} lines", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Crates whose types may have the names of others' still.
const NAMES_LATER: [&str; 3] = ["cryopod-cuda", "cryopod-preload", "cryopod-preload-wire"];
/// Names that several types may have.
const NAMES_OF_MANY: [&str; 3] = ["Args", "Error", "HostFacts"];

#[test]
fn types_have_names_of_their_own() {
    let mut found = BTreeMap::<String, Vec<String>>::new();
    let crates = LIBRARIES.iter().chain(&PROGRAMS);
    for (name, directory) in crates.filter(|(name, _)| !NAMES_LATER.contains(name)) {
        for (module, text) in modules(&root().join(directory).join("src")) {
            for line in text.lines() {
                let mut words = line.split_whitespace().skip_while(|w| w.starts_with("pub"));
                let is_type = words
                    .next()
                    .is_some_and(|w| ["struct", "enum", "union", "trait"].contains(&w));
                let word = words.next().unwrap_or_default();
                let end = word.find(|c: char| !c.is_alphanumeric());
                let of = &word[..end.unwrap_or(word.len())];
                if is_type && !NAMES_OF_MANY.contains(&of) {
                    let place = format!("{name}: {}", module.join("/"));
                    found.entry(of.to_owned()).or_default().push(place);
                }
            }
        }
    }
    found.retain(|_, places| places.len() > 1);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn modules_form_no_circles() {
    for (name, directory) in LIBRARIES.iter().chain(&PROGRAMS) {
        for (folder, imports) in imports(&root().join(directory).join("src")) {
            let folder = folder.join("/");
            assert_eq!(
                circles(&imports),
                [] as [String; 0],
                "{name}, {folder}: these modules import each other in a circle; move what they share into a module of its own"
            );
        }
    }
}

#[test]
fn crates_depend_downwards() {
    let depends = |directory: &str| {
        let manifest = fs::read_to_string(root().join(directory).join("Cargo.toml")).unwrap();
        let normal = manifest.split("[dev-dependencies]").next().unwrap();
        let names = normal
            .lines()
            .map(|l| l.split(['.', ' ', '=']).next().unwrap().to_owned());
        names.collect::<BTreeSet<String>>()
    };
    for (at, (name, directory)) in LIBRARIES.iter().enumerate() {
        let mut above = LIBRARIES[at..].iter().chain(&PROGRAMS);
        let found = depends(directory);
        let wrong = above.find(|(other, _)| found.contains(*other));
        assert_eq!(wrong, None, "{name} may not depend on it");
    }
    for (name, directory) in PROGRAMS {
        let found = depends(directory);
        let wrong = PROGRAMS.iter().find(|(other, _)| found.contains(*other));
        assert_eq!(wrong, None, "{name} may not depend on a program");
    }
}

#[test]
fn circles_are_found_at_every_depth() {
    let dir = std::env::temp_dir().join(format!("cryopod-layout-{}", std::process::id()));
    fs::create_dir_all(dir.join("b/in")).unwrap();
    for (file, text) in [
        ("lib.rs", "mod a;\nuse crate::a::x;\n"),
        ("a.rs", "use crate::{b::{self, x}, d as e};\n"),
        (
            "b/mod.rs",
            "// crate::a\nuse crate::c::y;\nuse self::one::z;\n",
        ),
        ("b/one.rs", "use super::two;\n"),
        ("b/two.rs", "fn f() { super::super::b::one::g() }\n"),
        ("b/in/alone.rs", "use super::super::x;\n"),
        ("c.rs", "fn f() { crate::a::g() }\n"),
        (
            "d.rs",
            "use crate::c;\n#[cfg(test)]\nmod tests { use crate::d; }\n",
        ),
    ] {
        fs::write(dir.join(file), text).unwrap();
    }
    let found: Vec<_> = imports(&dir).values().map(circles).collect();
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(found, [vec!["a", "b", "c", "d"], vec!["one", "two"]]);
}
