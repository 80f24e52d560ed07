//! Signs images and checks signatures, as cosign and containers/image do: "simple signing", ECDSA over P-256 and SHA-256.
//!
//! In a registry a signature is cosign's image `sha256-DIGEST.sig`. Beside an image on disk it is `PLACE.sig`, in the form in
//! which containers/image stores it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::source::Source;
use cryopod_host::files::{if_there, open_regular, read_bounded_from};
use cryopod_operations::config::restore::RestoreOptions;
use cryopod_registry::{
    Reference, RegistryOptions, SmallImage, parse_reference, pull_small, push_small,
};
use p256::ecdsa::signature::{Signer, Verifier};
use p256::ecdsa::{DerSignature, SigningKey, VerifyingKey};
use p256::pkcs8::{DecodePrivateKey, DecodePublicKey};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::cosign_key;
use crate::terminal::ui;

const KIND: &str = "cosign container image signature";
const MEDIA: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// Ahead of a stored signature.
const STORED: &[u8] = b"\0sigstore-json\n";
/// The most bytes of a signature or a key.
const MAX: usize = 64 << 10;

/// A signature of an image, as containers/image stores it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Signature {
    mime_type: String,
    /// In base64.
    payload: String,
    annotations: BTreeMap<String, String>,
}

/// What is signed.
#[derive(Deserialize)]
struct Payload {
    critical: Critical,
}

#[derive(Deserialize)]
struct Critical {
    #[serde(rename = "type")]
    kind: String,
    identity: Identity,
    image: SignedImage,
}

#[derive(Deserialize)]
struct Identity {
    #[serde(rename = "docker-reference")]
    reference: String,
}

#[derive(Deserialize)]
struct SignedImage {
    #[serde(rename = "docker-manifest-digest")]
    digest: String,
}

impl Signature {
    /// Signs the image with this digest. `reference`: its repository, which podman's policy compares.
    pub fn sign(key: &Path, reference: &str, digest: &Digest) -> anyhow::Result<Self> {
        let signing = signing_key(key)?;
        let payload = json!({
            "critical": {
                "identity": {"docker-reference": reference},
                "image": {"docker-manifest-digest": digest.to_string()},
                "type": KIND,
            },
            "optional": Value::Null,
        })
        .to_string();
        let signature: DerSignature = signing.sign(payload.as_bytes());
        let signature = BASE64.encode(signature.as_bytes());
        Ok(Self {
            mime_type: MEDIA.into(),
            payload: BASE64.encode(payload),
            annotations: [(ANNOTATION.to_owned(), signature)].into(),
        })
    }

    /// Writes it beside the image.
    pub fn write(&self, place: &Path) -> anyhow::Result<()> {
        let path = beside(place);
        let text = [STORED, &serde_json::to_vec(self)?].concat();
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        // What has the name already may be somebody's link.
        let written =
            NamedTempFile::new_in(parent.unwrap_or(Path::new("."))).and_then(|mut file| {
                file.write_all(&text)?;
                file.as_file().sync_all()?;
                file.as_file()
                    .set_permissions(Permissions::from_mode(0o644))?;
                Ok(file.persist(&path)?)
            });
        written
            .map(drop)
            .with_context(|| path.display().to_string())
    }

    /// Reads the one beside an image; `None` if there is none.
    pub fn read(place: &Path) -> anyhow::Result<Option<Self>> {
        let path = beside(place);
        let read = open_regular(&path).and_then(|file| read_bounded_from(file, MAX as u64));
        let Some(text) = if_there(read).with_context(|| path.display().to_string())? else {
            return Ok(None);
        };
        let json = text
            .strip_prefix(STORED)
            .and_then(|text| serde_json::from_slice(text).ok());
        let signature = json.with_context(|| format!("{}: no signature", path.display()))?;
        Ok(Some(signature))
    }

    /// Pushes it to where cosign and podman look for it.
    pub fn push(&self, image: &Reference, options: &RegistryOptions) -> anyhow::Result<()> {
        let small = SmallImage {
            media_type: MEDIA.into(),
            blob: BASE64.decode(&self.payload)?,
            annotations: self.annotations.clone(),
        };
        let digest = serde_json::from_slice::<Payload>(&small.blob)?
            .critical
            .image
            .digest;
        let digest = Digest::parse(&digest)?;
        Ok(push_small(&small, &image_of(image, &digest)?, options)?)
    }

    /// Fetches the signatures of an image.
    pub fn fetch(
        image: &Reference,
        digest: &Digest,
        options: &RegistryOptions,
    ) -> anyhow::Result<Vec<Self>> {
        let found = pull_small(&image_of(image, digest)?, MEDIA, MAX, options)?;
        let signature = |found: SmallImage| Self {
            mime_type: MEDIA.into(),
            payload: BASE64.encode(found.blob),
            annotations: found.annotations,
        };
        Ok(found.into_iter().map(signature).collect())
    }

    /// Checks that one of the keys signed this image. `repository`: where it came from.
    fn check(
        &self,
        keys: &[VerifyingKey],
        digest: &Digest,
        repository: Option<&str>,
    ) -> anyhow::Result<()> {
        let payload = BASE64.decode(&self.payload)?;
        let signature = self.annotations.get(ANNOTATION).context("no signature")?;
        let signature = DerSignature::from_bytes(&BASE64.decode(signature)?)?;
        if !keys
            .iter()
            .any(|key| key.verify(&payload, &signature).is_ok())
        {
            bail!("no key of restore.keys has signed it");
        }
        let Critical {
            kind,
            identity,
            image,
        } = serde_json::from_slice::<Payload>(&payload)?.critical;
        if kind != KIND || image.digest != digest.to_string() {
            bail!("the signature is that of {}", ui::plain(&image.digest));
        }
        // Else one of a repository's images could take another's place.
        let signed = parse_reference(&identity.reference).map(|r| repository_of(&r));
        if let Some(wanted) = repository
            && !signed.is_ok_and(|signed| signed == wanted)
        {
            let signed = ui::plain(&identity.reference);
            bail!("the signature names {signed:?} and not {wanted}; sign it with --name {wanted}");
        }
        Ok(())
    }
}

/// The name under which cosign keeps an image's signatures.
fn image_of(image: &Reference, digest: &Digest) -> anyhow::Result<Reference> {
    let name = repository_of(image);
    Ok(parse_reference(&format!(
        "{name}:sha256-{}.sig",
        digest.hex()
    ))?)
}

pub fn repository_of(image: &Reference) -> String {
    format!("{}/{}", image.registry(), image.repository())
}

fn beside(place: &Path) -> PathBuf {
    // A directory may have been named with a slash at its end.
    let mut name = OsString::from(place.components().as_path());
    name.push(".sig");
    name.into()
}

/// Reads a private key.
pub fn signing_key(path: &Path) -> anyhow::Result<SigningKey> {
    let text = read_key(path)?;
    let shown = path.display();
    if let Some(der) = cosign_key::decrypt(&text).with_context(|| shown.to_string())? {
        let key = SigningKey::from_pkcs8_der(&der);
        return key.with_context(|| format!("{shown}: no private key of P-256"));
    }
    SigningKey::from_pkcs8_pem(&text).with_context(|| {
        format!(
            "{shown}: no private key of P-256: neither cosign's nor PKCS #8 without a passphrase (openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256)"
        )
    })
}

fn read_key(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = fs::File::open(path).and_then(|f| f.take(MAX as u64).read_to_string(&mut text));
    read.with_context(|| path.display().to_string())?;
    Ok(text)
}

/// Refuses an image that nobody of `restore.keys` has signed. `repository`: that of a registry; of an archive only where the
/// configuration requires it.
pub fn require(
    options: &RestoreOptions,
    digest: &Digest,
    repository: Option<&str>,
    signatures: impl FnOnce() -> anyhow::Result<Vec<Signature>>,
) -> anyhow::Result<()> {
    if options.require.is_none() && (repository.is_none() || options.keys.is_empty()) {
        return Ok(());
    }
    let keys = keys_of(options)?;
    let mut why = anyhow!("it has no signature");
    for signature in signatures()? {
        match signature.check(&keys, digest, repository) {
            Ok(()) => return Ok(()),
            Err(e) => why = e,
        }
    }
    Err(why.context(format!(
        "{digest}: refused, as a key of restore.keys must have signed it"
    )))
}

/// Returns the signature that goes beside an image on disk, where one has its place: the first that a key of
/// `restore.keys` made, else the first.
pub fn kept(
    options: &RestoreOptions,
    digest: &Digest,
    mut found: Vec<Signature>,
) -> anyhow::Result<Option<Signature>> {
    let keys = keys_of(options)?;
    let good = |signature: &Signature| signature.check(&keys, digest, None).is_ok();
    let number = found.iter().position(good).unwrap_or(0);
    if found.len() > 1 {
        let others = found.len() - 1;
        tracing::warn!("{digest}: {others} more signatures stay in the registry");
    }
    Ok((number < found.len()).then(|| found.swap_remove(number)))
}

fn keys_of(options: &RestoreOptions) -> anyhow::Result<Vec<VerifyingKey>> {
    let keys = options.keys.iter().map(|path| {
        // The nodes of a cluster have one configuration, and need no file beside it.
        let text = match path.to_str().map(str::trim) {
            Some(text) if text.starts_with("-----BEGIN ") => text.to_owned(),
            _ => read_key(path)?,
        };
        let key = VerifyingKey::from_public_key_pem(&text);
        key.with_context(|| format!("{}: no public key of P-256", path.display()))
    });
    keys.collect()
}

/// [`require`] for an archive on this host, by the signature beside it.
pub fn require_beside(options: &RestoreOptions, source: &Source) -> anyhow::Result<()> {
    match (options.require, source.image()) {
        (None, _) => Ok(()),
        (Some(_), Some(image)) => require(options, &image.digest, None, || {
            Ok(Signature::read(source.path())?.into_iter().collect())
        }),
        (Some(_), None) => bail!(
            "{}: refused, as restore.require = \"signed\": a {} has no signature; oci:DIR and oci-archive:FILE may have one",
            source.path().display(),
            source.kind()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_operations::config::restore::Requirement;
    use p256::pkcs8::{EncodePrivateKey, EncodePublicKey, LineEnding};

    /// A key's private file, and its public one.
    fn key(dir: &Path, name: &str, number: u8) -> (PathBuf, PathBuf) {
        let signing = SigningKey::from_slice(&[number; 32]).unwrap();
        let (private, public) = (dir.join(name), dir.join(format!("{name}.pub")));
        let pem = signing.to_pkcs8_pem(LineEnding::LF).unwrap();
        fs::write(&private, pem.as_bytes()).unwrap();
        let pem = signing.verifying_key().to_public_key_pem(LineEnding::LF);
        fs::write(&public, pem.unwrap()).unwrap();
        (private, public)
    }

    #[test]
    fn who_has_signed_which_image_of_which_repository() {
        let dir = tempfile::tempdir().unwrap();
        let (private, public) = key(dir.path(), "ours", 7);
        let (_, other) = key(dir.path(), "other", 8);
        let digest = Digest::of(b"image");
        let named = "r.example/team/job:1";
        let sign = || Signature::sign(&private, named, &digest).unwrap();
        let asked = |keys: &[&PathBuf], digest: &Digest, repository, signatures| {
            let options = RestoreOptions {
                require: Some(Requirement::Signed),
                keys: keys.iter().map(|k| k.to_path_buf()).collect(),
                ..RestoreOptions::default()
            };
            require(&options, digest, repository, || Ok(signatures)).map_err(|e| format!("{e:#}"))
        };
        asked(&[&other, &public], &digest, None, vec![sign()]).unwrap();
        asked(
            &[&public],
            &digest,
            Some("r.example/team/job"),
            vec![sign()],
        )
        .unwrap();
        let text = PathBuf::from(fs::read_to_string(&public).unwrap());
        asked(&[&text], &digest, None, vec![sign()]).unwrap();
        for (keys, digest, repository, signatures, why) in [
            (&[&public][..], &digest, None, vec![], "no signature"),
            (&[], &digest, None, vec![sign()], "no key of restore.keys"),
            (
                &[&other],
                &digest,
                None,
                vec![sign()],
                "no key of restore.keys",
            ),
            (&[&private], &digest, None, vec![sign()], "no public key"),
            (
                &[&public],
                &Digest::of(b"x"),
                None,
                vec![sign()],
                "is that of",
            ),
            (
                &[&public],
                &digest,
                Some("r.example/b"),
                vec![sign()],
                "names \"r.example/team/job:1\" and not r.example/b; sign it with --name",
            ),
        ] {
            let said = asked(keys, digest, repository, signatures).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
        // Keys are enough for images of registries. Where nobody asks, nobody looks.
        let keys = RestoreOptions {
            keys: vec![other],
            ..RestoreOptions::default()
        };
        let asks = |options: &RestoreOptions, repository| {
            require(options, &digest, repository, || Ok(vec![sign()])).is_err()
        };
        assert!(asks(&keys, Some("r.example/team/job")));
        assert!(!asks(&keys, None));
        assert!(!asks(
            &RestoreOptions::default(),
            Some("r.example/team/job")
        ));
    }

    #[test]
    fn the_signature_that_counts_here_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (other, _) = key(dir.path(), "other", 8);
        let (ours, public) = key(dir.path(), "ours", 7);
        let digest = Digest::of(b"image");
        let kept_of = |keys: Vec<PathBuf>, private: &[&PathBuf]| {
            let sign = |key: &&PathBuf| Signature::sign(key, "r.example/job", &digest).unwrap();
            let found: Vec<_> = private.iter().map(sign).collect();
            let options = RestoreOptions {
                keys,
                ..RestoreOptions::default()
            };
            let kept = kept(&options, &digest, found).unwrap()?;
            let by = |key: &&PathBuf| sign(key).annotations == kept.annotations;
            private.iter().position(by)
        };
        assert_eq!(kept_of(vec![public.clone()], &[&other, &ours]), Some(1));
        assert_eq!(kept_of(vec![public], &[&other, &other]), Some(0));
        assert_eq!(kept_of(vec![], &[&other, &ours]), Some(0));
        assert_eq!(kept_of(vec![], &[]), None);
        assert_eq!(beside(Path::new("a/b//")), Path::new("a/b.sig"));
    }

    #[test]
    fn every_changed_bit_of_a_signature_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (private, public) = key(dir.path(), "ours", 7);
        let key = VerifyingKey::from_public_key_pem(&read_key(&public).unwrap()).unwrap();
        let (digest, place) = (Digest::of(b"image"), dir.path().join("layout"));
        assert!(Signature::read(&place).unwrap().is_none());
        let signature = Signature::sign(&private, "r.example/job", &digest).unwrap();
        signature.write(&place).unwrap();
        let whole = Signature::read(&place).unwrap().unwrap();
        whole.check(&[key], &digest, Some("r.example/job")).unwrap();
        let payload = BASE64.decode(&whole.payload).unwrap();
        let signed = BASE64.decode(&whole.annotations[ANNOTATION]).unwrap();
        let flipped = |bytes: &[u8], bit: usize| {
            let mut bytes = bytes.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            BASE64.encode(bytes)
        };
        let with = |payload: String, signed: String| Signature {
            mime_type: MEDIA.into(),
            payload,
            annotations: [(ANNOTATION.to_owned(), signed)].into(),
        };
        for bit in 0..payload.len() * 8 {
            let changed = with(flipped(&payload, bit), BASE64.encode(&signed));
            assert!(changed.check(&[key], &digest, None).is_err(), "{bit}");
        }
        for bit in 0..signed.len() * 8 {
            let changed = with(BASE64.encode(&payload), flipped(&signed, bit));
            assert!(changed.check(&[key], &digest, None).is_err(), "{bit}");
        }
    }
}
