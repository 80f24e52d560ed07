//! Connects to a registry: protocol, credentials, limits.

use std::future::Future;
use std::time::Duration;

use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};

use crate::session::{Origin, Session};
use crate::text::{causes, shortened};
use crate::{Error, Options, auth};

/// A registry that has answered, for one image.
pub(crate) struct Registry {
    /// Used by a push.
    pub(crate) client: Client,
    /// Used for all untrusted answers.
    pub(crate) session: Session,
    pub(crate) image: Reference,
    pub(crate) auth: RegistryAuth,
    /// The login is an identity token. `client` cannot exchange it, and gets the session's access token.
    identity: bool,
    step_limit: Duration,
}

impl Registry {
    pub(crate) async fn connect(
        image: &Reference,
        operation: RegistryOperation,
        options: &Options,
    ) -> Result<Self, Error> {
        let credentials = match &options.credentials {
            Some(given) => Some((given.clone(), Origin::Given)),
            None => {
                let (registry, repository) = (image.registry(), image.repository());
                let found = auth::find(options.auth_file.as_deref(), registry, repository)?;
                found.map(|stored| (stored, Origin::Stored))
            }
        };
        let auth = credentials
            .as_ref()
            .filter(|(c, _)| !c.identity_token)
            .map_or(RegistryAuth::Anonymous, |(c, _)| {
                RegistryAuth::Basic(c.user.clone(), c.password.clone())
            });
        let identity = credentials.as_ref().is_some_and(|(c, _)| c.identity_token);
        let with = |protocol, scheme| {
            let session = Session::new(image, scheme, operation, credentials.clone(), options)?;
            Ok::<_, Error>(Self {
                client: client(protocol, options),
                session,
                image: image.clone(),
                auth: auth.clone(),
                identity,
                step_limit: options.step_limit,
            })
        };
        let mut registry = with(ClientProtocol::Https, "https")?;
        match registry.ask_access().await {
            Err(Error::Connect { .. }) if !options.tls_verify => {
                let mut registry = with(ClientProtocol::Http, "http")?;
                registry.ask_access().await.map(|()| registry)
            }
            Err(Error::Connect {
                registry, reason, ..
            }) => Err(Error::Connect {
                registry,
                reason,
                tls: options.tls_verify,
            }),
            done => done.map(|()| registry),
        }
    }

    async fn ask_access(&mut self) -> Result<(), Error> {
        let host = self.image.resolve_registry();
        if !self.identity {
            self.client.store_auth_if_needed(host, &self.auth).await;
        }
        self.within("asking for access", self.session.connect())
            .await?;
        if self.identity
            && let Some(token) = self.session.bearer()
        {
            self.auth = RegistryAuth::Bearer(token);
            self.client.store_auth_if_needed(host, &self.auth).await;
        }
        Ok(())
    }

    /// Runs one step of the session within the time limit.
    pub(crate) async fn within<T>(
        &self,
        step: &str,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(self.step_limit, future).await {
            Ok(done) => done,
            Err(_) => Err(self.failed(
                step,
                format!("no answer within {} s", self.step_limit.as_secs()),
            )),
        }
    }

    pub(crate) async fn step<T>(
        &self,
        step: &str,
        future: impl Future<Output = Result<T, OciDistributionError>>,
    ) -> Result<T, Error> {
        let done = async { future.await.map_err(|e| self.error(step, e)) };
        self.within(step, done).await
    }

    pub(crate) fn failed(&self, step: &str, reason: impl Into<String>) -> Error {
        Error::Step {
            image: self.image.to_string(),
            step: step.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn content(&self, reason: impl Into<String>) -> Error {
        Error::Content {
            image: self.image.to_string(),
            reason: reason.into(),
        }
    }

    /// Maps the client's error to one of ours, by its remedy.
    pub(crate) fn error(&self, step: &str, error: OciDistributionError) -> Error {
        use OciDistributionError as E;
        let image = self.image.to_string();
        match error {
            E::UnauthorizedError { .. }
            | E::ServerError {
                code: 401 | 403, ..
            } => Error::Access {
                image,
                reason: "not authorised".into(),
            },
            E::AuthenticationFailure(reason) => Error::Access {
                image,
                reason: shortened(&reason),
            },
            E::ImageManifestNotFoundError(_) | E::ServerError { code: 404, .. } => {
                Error::NotFound { image }
            }
            E::RegistryError { envelope, .. } => {
                use oci_client::errors::OciErrorCode as Code;
                let has = |code: Code| envelope.errors.iter().any(|e| e.code == code);
                if has(Code::ManifestUnknown) || has(Code::NameUnknown) || has(Code::NotFound) {
                    Error::NotFound { image }
                } else if has(Code::Unauthorized) || has(Code::Denied) {
                    let reason = shortened(&envelope.to_string());
                    Error::Access { image, reason }
                } else {
                    self.failed(step, shortened(&envelope.to_string()))
                }
            }
            E::RequestError(e) if e.is_connect() => Error::Connect {
                registry: self.image.resolve_registry().into(),
                reason: causes(&e),
                tls: false,
            },
            E::RequestError(e) => match e.status().map(|s| s.as_u16()) {
                Some(401 | 403) => Error::Access {
                    image,
                    reason: "not authorised".into(),
                },
                Some(404) => Error::NotFound { image },
                Some(status) => self.failed(step, format!("the registry says {status}")),
                None => self.failed(step, causes(&e)),
            },
            E::ServerError { code, message, .. } => self.failed(
                step,
                format!("the registry says {code}: {}", shortened(&message)),
            ),
            other => self.failed(step, shortened(&other.to_string())),
        }
    }
}

fn client(protocol: ClientProtocol, options: &Options) -> Client {
    // An error means that another provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::new(ClientConfig {
        protocol,
        accept_invalid_certificates: !options.tls_verify,
        use_monolithic_push: true,
        platform_resolver: None,
        read_timeout: Some(options.stall_limit),
        connect_timeout: Some(options.step_limit),
        user_agent: concat!("cryopod/", env!("CARGO_PKG_VERSION")),
        ..ClientConfig::default()
    })
}
