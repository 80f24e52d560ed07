//! Parses the tables `[restore]` and `[checkpoint]`: who may create containers from which checkpoints, and whose
//! containers are checkpointed where.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::config::tenant::Tenant;

/// What an image in a registry is named with.
pub const REGISTRY: &str = "docker://";
/// What a place in object storage begins with.
pub const OBJECTS: &str = "s3://";
/// In a list of namespaces: all of them.
const ANY: &str = "*";

/// `[restore]`, `[checkpoint]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RestoreOptions {
    pub allow: Vec<Rule>,
    /// What archives must have, too.
    pub require: Option<Requirement>,
    /// Public keys of P-256, in PEM or files with it: if there are any, one of them must have signed an image of a registry.
    pub keys: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Requirement {
    Signed,
}

/// Who asks for a checkpoint or a place.
#[derive(Debug, Clone, Copy)]
pub struct Asker<'a> {
    pub tenant: &'a Tenant,
    /// By a variable of the container's process, which may be the image's.
    pub by_variable: bool,
}

impl Asker<'_> {
    /// The rules that count for this container.
    pub fn rules<'c>(&self, options: &'c RestoreOptions) -> impl Iterator<Item = &'c Rule> {
        let counts =
            |rule: &&Rule| rule.admits(self.tenant) && (rule.variable || !self.by_variable);
        options.allow.iter().filter(counts)
    }

    /// What a refusal says: the same whether it exists, and whether another tenant may have it. `key`: of the rules.
    pub fn not_allowed(&self, what: &str, key: &str) -> String {
        let mut rule = format!("{{ from = \"{}\"", what.to_uppercase());
        if !self.tenant.is_root() {
            rule = format!("{rule}, {}", self.tenant);
        }
        if self.by_variable {
            // Whoever made the image may have set the variable.
            rule = format!("{rule}, variable = true");
        }
        format!(
            "that is not allowed: if it may be, add its {what} to `{key}` in {} as {rule} }}",
            super::PATH
        )
    }
}

/// Checkpoints, and whose containers may be created from them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    /// A directory with checkpoints, a place as `s3://BUCKET[/PREFIX]`, or a registry or repository as
    /// `docker://REGISTRY[/REPOSITORY]`.
    pub from: String,
    /// `None`: root's own engines.
    pub who: Option<Who>,
    /// The variable of the container's process counts, which an image can set by itself.
    pub variable: bool,
    /// In place of `restore.keys`, for a registry.
    pub keys: Vec<PathBuf>,
}

/// The tenants whose containers a rule admits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Who {
    pub users: Vec<u32>,
    pub containerd: Vec<String>,
    pub kubernetes: Vec<String>,
}

impl Rule {
    /// Returns true if this tenant's containers may be created from the rule's checkpoints.
    pub fn admits(&self, tenant: &Tenant) -> bool {
        let has = |names: &[String], name: &str| names.iter().any(|n| n == ANY || n == name);
        match (&self.who, tenant) {
            (None, tenant) => tenant.is_root(),
            (Some(who), Tenant::User(uid)) => who.users.contains(uid),
            (Some(who), Tenant::Pod(namespace)) => {
                let namespace = namespace.as_deref();
                namespace.is_some_and(|name| has(&who.kubernetes, name))
            }
            (Some(who), Tenant::Containerd(name)) => {
                has(&who.containerd, name) || tenant.is_root() && who.users.contains(&0)
            }
            (Some(who), Tenant::Root) => who.users.contains(&0),
        }
    }

    /// The rule's directory; `None` for a registry or object storage.
    pub fn directory(&self) -> Option<&Path> {
        let is_elsewhere = self.from.starts_with(REGISTRY) || self.is_object_storage();
        (!is_elsewhere).then(|| Path::new(&self.from))
    }

    fn is_object_storage(&self) -> bool {
        self.from.starts_with(OBJECTS)
    }

    /// Returns true if the rule has this place in object storage: its bucket, or what its name begins with up to a `/`.
    pub fn has_object(&self, place: &str) -> bool {
        let from = self.from.trim_end_matches('/');
        let rest = place.trim_end_matches('/').strip_prefix(from);
        self.is_object_storage() && rest.is_some_and(|r| r.is_empty() || r.starts_with('/'))
    }

    /// Checks what the types do not say.
    fn check(&self) -> Result<(), String> {
        // No image is named otherwise: `cryopod_registry::parse_reference`.
        let registry = self.from.strip_prefix(REGISTRY);
        let registry = registry.and_then(|name| name.split('/').next());
        if registry.is_some_and(|r| !r.contains(['.', ':']) && r != "localhost") {
            return Err(format!(
                "{} names no registry, as in {REGISTRY}docker.io/team",
                self.from
            ));
        }
        if self.is_object_storage() {
            bucket_and_prefix(&self.from)?;
        }
        if self.directory().is_some_and(Path::is_relative) {
            return Err(format!(
                "{} is no absolute path, and no {REGISTRY}REGISTRY",
                self.from
            ));
        }
        if !self.from.starts_with(REGISTRY) && !self.keys.is_empty() {
            return Err(format!(
                "{}: `keys` are those of a {REGISTRY}REGISTRY",
                self.from
            ));
        }
        let Some(who) = &self.who else { return Ok(()) };
        let mut names = who.containerd.iter().chain(&who.kubernetes);
        if names.any(|n| n.is_empty()) {
            return Err(format!("{}: an empty name of a namespace", self.from));
        }
        Ok(())
    }
}

impl RestoreOptions {
    /// Checks the rules.
    pub fn check(&self) -> Result<(), String> {
        self.allow.iter().try_for_each(Rule::check)
    }

    /// Checks rules for places.
    pub fn check_places(&self) -> Result<(), String> {
        let mut rules = self.allow.iter();
        match rules.find(|rule| rule.from.starts_with(REGISTRY)) {
            Some(rule) => Err(format!(
                "{} is no directory, and no {}BUCKET",
                rule.from, OBJECTS
            )),
            None => self.check(),
        }
    }
}

/// Returns the bucket and the prefix of a place in object storage.
pub fn bucket_and_prefix(url: &str) -> Result<(&str, &str), String> {
    let wrong = || format!("{url}: not {OBJECTS}BUCKET[/PREFIX]");
    let rest = url.strip_prefix(OBJECTS).ok_or_else(wrong)?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
    let is_bucket = (3..=63).contains(&bucket.len()) && bucket.bytes().all(plain);
    let prefix = prefix.trim_end_matches('/');
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._/".contains(&b);
    let parts = prefix
        .split('/')
        .all(|p| !p.is_empty() && !p.starts_with('.'));
    let is_prefix = prefix.is_empty() || parts && prefix.bytes().all(plain);
    (is_bucket && is_prefix)
        .then_some((bucket, prefix))
        .ok_or_else(wrong)
}

/// A text, or a table. Not an untagged enum, whose errors name neither key nor reason.
impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            from: String,
            users: Option<Vec<u32>>,
            containerd: Option<Vec<String>>,
            kubernetes: Option<Vec<String>>,
            #[serde(default)]
            variable: bool,
            #[serde(default)]
            keys: Vec<PathBuf>,
        }
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Rule;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a directory or registry, or { from = \"...\", kubernetes = [\"...\"] }",
                )
            }

            fn visit_str<E>(self, from: &str) -> Result<Rule, E> {
                Ok(Rule {
                    from: from.to_owned(),
                    ..Rule::default()
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Rule, A::Error> {
                let table = Table::deserialize(MapAccessDeserializer::new(map))?;
                let who = match (&table.users, &table.containerd, &table.kubernetes) {
                    (None, None, None) => None,
                    _ => Some(Who {
                        users: table.users.unwrap_or_default(),
                        containerd: table.containerd.unwrap_or_default(),
                        kubernetes: table.kubernetes.unwrap_or_default(),
                    }),
                };
                Ok(Rule {
                    from: table.from,
                    who,
                    variable: table.variable,
                    keys: table.keys,
                })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Result<Rule, String> {
        let options: RestoreOptions =
            toml::from_str(&format!("allow = [{text}]")).map_err(|e| e.to_string())?;
        options.check()?;
        Ok(options.allow.into_iter().next().unwrap())
    }

    #[test]
    fn a_rule_admits_those_that_it_names() {
        let tenants = [
            ("root", Tenant::Root),
            ("docker", Tenant::Containerd("moby".into())),
            ("ctr", Tenant::Containerd("default".into())),
            ("a", Tenant::Containerd("a".into())),
            ("pod-a", Tenant::Pod(Some("a".into()))),
            ("pod-b", Tenant::Pod(Some("b".into()))),
            ("pod-?", Tenant::Pod(None)),
            ("1000", Tenant::User(1000)),
        ];
        for (text, want) in [
            ("\"/srv\"", &["root", "docker", "ctr"][..]),
            ("{from = \"/srv\"}", &["root", "docker", "ctr"]),
            ("{from = \"/srv\", users = [0]}", &["root", "docker", "ctr"]),
            ("{from = \"/srv\", users = [1000]}", &["1000"]),
            ("{from = \"/srv\", containerd = [\"a\"]}", &["a"]),
            ("{from = \"/srv\", kubernetes = [\"a\"]}", &["pod-a"]),
            (
                "{from = \"/srv\", kubernetes = [\"*\"]}",
                &["pod-a", "pod-b"],
            ),
            (
                "{from = \"/srv\", kubernetes = [\"b\"], users = [1000], containerd = [\"default\"]}",
                &["ctr", "pod-b", "1000"],
            ),
            ("{from = \"/srv\", kubernetes = []}", &[]),
        ] {
            let rule = rule(text).unwrap();
            let admitted: Vec<_> = tenants.iter().filter(|(_, t)| rule.admits(t)).collect();
            let admitted: Vec<_> = admitted.iter().map(|(name, _)| *name).collect();
            assert_eq!(admitted, want, "{text}");
        }
    }

    #[test]
    fn names_of_places() {
        let (bucket, prefix) = bucket_and_prefix("s3://jobs/team/a/").unwrap();
        assert_eq!((bucket, prefix), ("jobs", "team/a"));
        assert_eq!(bucket_and_prefix("s3://jobs").unwrap().1, "");
        for bad in [
            "s3://",
            "s3://a",
            "s3://Jobs",
            "s3://jobs//a",
            "s3://jobs/../a",
            "/srv",
            "gs://jobs",
        ] {
            let said = bucket_and_prefix(bad).unwrap_err();
            assert!(said.contains("not s3://BUCKET[/PREFIX]"), "{said}");
        }
    }

    #[test]
    fn mistakes_name_the_key() {
        for (text, needle) in [
            ("\"opt\"", "opt is no absolute path"),
            ("{from = \"opt\"}", "opt is no absolute path"),
            ("{kubernetes = [\"a\"]}", "from"),
            ("{from = \"/a\", kubernets = [\"a\"]}", "kubernets"),
            ("{from = \"/a\", users = [\"a\"]}", "invalid type"),
            ("{from = \"/a\", users = [-1]}", "-1"),
            ("{from = \"/a\", containerd = [\"\"]}", "/a: an empty name"),
            ("{from = \"/a\", keys = [\"/k\"]}", "/a: `keys` are"),
            ("\"docker://\"", "docker:// names no registry"),
            ("\"docker:///a\"", "docker:///a names no registry"),
            ("\"docker://team\"", "docker://team names no registry"),
            ("1", "a directory or registry"),
        ] {
            let e = rule(text).unwrap_err();
            assert!(e.contains(needle), "{text}: {e}");
        }
    }
}
