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

type Imports = BTreeMap<String, BTreeSet<String>>;

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

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The first names of what follows `crate::`: one, or those of a group.
fn first_names(text: &str) -> Vec<&str> {
    let Some(group) = text.strip_prefix('{') else {
        return vec![word(text)];
    };
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(word(group[start..at].trim()));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(word(group[start..at].trim()));
                start = at + 1;
            }
            _ => {}
        }
    }
    names
}

/// Which module of a crate names which other.
fn imports(src: &Path) -> Imports {
    let mut files = Vec::new();
    sources(src, &mut files);
    let module = |file: &Path| {
        let first = file.strip_prefix(src).unwrap().components().next().unwrap();
        let first = first.as_os_str().to_string_lossy().into_owned();
        first.strip_suffix(".rs").unwrap_or(&first).to_owned()
    };
    let modules: BTreeSet<String> = files.iter().map(|f| module(f)).collect();
    let mut found = Imports::new();
    for file in files {
        let own = module(&file);
        let text = code(&file);
        let named = text.split("crate::").skip(1).flat_map(first_names);
        let named = named.filter(|n| *n != own && modules.contains(*n));
        found
            .entry(own.clone())
            .or_default()
            .extend(named.map(str::to_owned));
    }
    // The crate's root names its modules, as it must.
    found.remove("lib");
    found.remove("main");
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

#[test]
fn modules_form_no_circles() {
    for (name, directory) in LIBRARIES.iter().chain(&PROGRAMS) {
        let found = circles(&imports(&root().join(directory).join("src")));
        assert!(
            found.is_empty(),
            "{name}: these modules import each other in a circle: {found:?}; move what they share into a module of its own"
        );
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
fn a_circle_is_found() {
    let dir = std::env::temp_dir().join(format!("cryopod-layout-{}", std::process::id()));
    fs::create_dir_all(dir.join("b")).unwrap();
    fs::write(dir.join("a.rs"), "use crate::{b::{self, x}, d};\n").unwrap();
    fs::write(dir.join("b/mod.rs"), "// crate::a\nuse crate::c::y;\n").unwrap();
    fs::write(dir.join("c.rs"), "fn f() { crate::a::g() }\n").unwrap();
    fs::write(
        dir.join("d.rs"),
        "use crate::c;\n#[cfg(test)]\nmod tests { use crate::d; }\n",
    )
    .unwrap();
    let found = circles(&imports(&dir));
    fs::remove_dir_all(&dir).unwrap();
    assert_eq!(found, ["a", "b", "c", "d"]);
}
