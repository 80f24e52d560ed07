//! Queries a registry whose answers are untrusted.
//!
//! Tokens, manifests and error texts have a limit, and [`crate::trust`] decides where credentials may go.

use std::ops::Range;
use std::sync::Mutex;

use bytes::Bytes;
use futures_util::StreamExt;
use oci_spec::distribution::Reference;
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RANGE,
    WWW_AUTHENTICATE,
};
use reqwest::redirect::Policy;
use reqwest::{Body, Client, Method, Response, StatusCode, Url};
use serde::Deserialize;

use crate::auth::Login;
use crate::text::{causes, shortened};
use crate::trust::{RegistryOrigin, Transport, may_have};
use crate::{Error, RegistryOptions};

/// Largest token answer, in bytes.
const MAX_TOKEN: usize = 256 << 10;
/// Largest text of an error that is read, in bytes.
const MAX_REASON: usize = 16 << 10;

/// What a session is for; the scope of its token.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TokenAccess {
    Pull,
    Push,
}

#[derive(Debug)]
pub(crate) struct RegistrySession {
    http: Client,
    /// For blobs that are sent: reqwest's read timeout runs from the request on, while the body is sent too. For tokens:
    /// a redirect would take the login to another host.
    direct: Client,
    image: Reference,
    transport: Transport,
    registry: Url,
    scope: String,
    credentials: Option<(Login, RegistryOrigin)>,
    authorization: Mutex<Option<HeaderValue>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
    },
}

#[derive(Deserialize)]
struct BearerToken {
    #[serde(alias = "access_token")]
    token: String,
}

impl RegistrySession {
    pub(crate) fn new(
        image: &Reference,
        transport: Transport,
        access: TokenAccess,
        credentials: Option<(Login, RegistryOrigin)>,
        options: &RegistryOptions,
    ) -> Result<Self, Error> {
        let wrong = |reason: String| Error::Connect {
            registry: image.resolve_registry().into(),
            reason,
            tls: false,
        };
        // An error means that another provider is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = || {
            Client::builder()
                .danger_accept_invalid_certs(transport == Transport::UnverifiedTls)
                .connect_timeout(options.step_limit)
                .user_agent(concat!("cryopod/", env!("CARGO_PKG_VERSION")))
        };
        let http = client().read_timeout(options.stall_limit).build();
        let direct = client().redirect(Policy::none()).build();
        let scheme = match transport {
            Transport::Tls | Transport::UnverifiedTls => "https",
            Transport::Plain => "http",
        };
        let registry = format!("{scheme}://{}/v2/", image.resolve_registry());
        let registry = Url::parse(&registry).map_err(|e| wrong(e.to_string()))?;
        let actions = match access {
            TokenAccess::Pull => "pull",
            TokenAccess::Push => "pull,push",
        };
        Ok(Self {
            http: http.map_err(|e| wrong(causes(&e)))?,
            direct: direct.map_err(|e| wrong(causes(&e)))?,
            image: image.clone(),
            transport,
            registry,
            scope: format!("repository:{}:{actions}", image.repository()),
            credentials,
            authorization: Mutex::new(None),
        })
    }

    /// Checks that the registry answers, and asks for access.
    pub(crate) async fn connect(&self) -> Result<(), Error> {
        let ask = self.send(
            Method::GET,
            self.registry.clone(),
            HeaderMap::new(),
            Bytes::new(),
        );
        self.authorize(&ask.await?).await.map(|_| ())
    }

    /// Requests something of the repository: `manifests/TAG`, `blobs/DIGEST`.
    pub(crate) async fn get(
        &self,
        step: &str,
        what: &str,
        accept: &[&str],
    ) -> Result<Response, Error> {
        let mut headers = HeaderMap::new();
        if !accept.is_empty() {
            let accept = accept.join(", ").parse();
            headers.insert(
                ACCEPT,
                accept.map_err(|_| self.failed(step, "no media type"))?,
            );
        }
        self.ask(step, Method::GET, what, headers, Bytes::new())
            .await
    }

    /// Gets a part of a blob.
    pub(crate) async fn get_part(
        &self,
        step: &str,
        what: &str,
        part: Range<u64>,
    ) -> Result<Response, Error> {
        let mut headers = HeaderMap::new();
        let range = format!("bytes={}-{}", part.start, part.end.saturating_sub(1)).parse();
        headers.insert(RANGE, range.map_err(|_| self.failed(step, "no range"))?);
        let asked = self.ask(step, Method::GET, what, headers, Bytes::new());
        let answer = asked.await?;
        match answer.status() {
            StatusCode::PARTIAL_CONTENT => Ok(answer),
            _ => Err(self.failed(step, "the registry sends blobs only whole")),
        }
    }

    /// Returns true if the repository has a blob.
    pub(crate) async fn has_blob(&self, step: &str, digest: &str) -> Result<bool, Error> {
        let what = format!("blobs/{digest}");
        let asked = self.ask(step, Method::HEAD, &what, HeaderMap::new(), Bytes::new());
        match asked.await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Begins to send a blob; returns where it goes.
    pub(crate) async fn begin_blob(&self, step: &str, digest: &str) -> Result<Url, Error> {
        let headers = HeaderMap::from_iter([(CONTENT_LENGTH, HeaderValue::from(0))]);
        let asked = self.ask(step, Method::POST, "blobs/uploads/", headers, Bytes::new());
        let answer = asked.await?;
        let place = answer.headers().get(LOCATION).and_then(|l| l.to_str().ok());
        let place = place.and_then(|place| answer.url().join(place).ok());
        let mut place = place.ok_or_else(|| self.failed(step, "it does not say where to"))?;
        place.query_pairs_mut().append_pair("digest", digest);
        Ok(place)
    }

    /// Sends a blob, whole. Another host than the registry, which may keep the blobs, gets no credentials.
    pub(crate) async fn send_blob(
        &self,
        step: &str,
        place: Url,
        size: u64,
        blob: Body,
    ) -> Result<(), Error> {
        let own = place.origin() == self.registry.origin();
        let mut request = self.direct.put(place).body(blob);
        request = request
            .header(CONTENT_LENGTH, size)
            .header(CONTENT_TYPE, "application/octet-stream");
        if let Some(known) = self.known().filter(|_| own) {
            request = request.header(AUTHORIZATION, known);
        }
        let answer = request.send().await.map_err(|e| self.unanswered(&e))?;
        self.checked(step, answer).await.map(drop)
    }

    /// Names a manifest.
    pub(crate) async fn send_manifest(
        &self,
        step: &str,
        name: &str,
        media_type: &'static str,
        raw: Bytes,
    ) -> Result<(), Error> {
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(media_type))]);
        let what = format!("manifests/{name}");
        self.ask(step, Method::PUT, &what, headers, raw)
            .await
            .map(drop)
    }

    /// Sends a request about the repository, again with access if the registry asks for it.
    async fn ask(
        &self,
        step: &str,
        method: Method,
        what: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response, Error> {
        let place = format!("{}/{what}", self.image.repository());
        let url = self.registry.join(&place);
        let url = url.map_err(|e| self.failed(step, e.to_string()))?;
        let send = || self.send(method.clone(), url.clone(), headers.clone(), body.clone());
        let mut answer = send().await?;
        // The first request, or an expired token.
        if answer.status() == StatusCode::UNAUTHORIZED && self.authorize(&answer).await? {
            answer = send().await?;
        }
        self.checked(step, answer).await
    }

    async fn checked(&self, step: &str, answer: Response) -> Result<Response, Error> {
        match answer.status() {
            status if status.is_success() => Ok(answer),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(self.no_access("not authorised"))
            }
            StatusCode::NOT_FOUND => Err(Error::NotFound {
                image: self.image.to_string(),
            }),
            status => {
                let text = self.bounded(step, answer, MAX_REASON).await;
                let text = text.map(|text| format!(": {}", String::from_utf8_lossy(&text)));
                let text = shortened(&text.unwrap_or_default());
                Err(self.failed(step, format!("the registry says {status}{text}")))
            }
        }
    }

    fn known(&self) -> Option<HeaderValue> {
        self.authorization.lock().ok().and_then(|a| a.clone())
    }

    async fn send(
        &self,
        method: Method,
        url: Url,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response, Error> {
        let mut request = self.http.request(method, url).headers(headers).body(body);
        if let Some(known) = self.known() {
            request = request.header(AUTHORIZATION, known);
        }
        request.send().await.map_err(|e| self.unanswered(&e))
    }

    /// Gets the access that the registry asks for; `false` if it asks for nothing that we can give.
    async fn authorize(&self, answer: &Response) -> Result<bool, Error> {
        let asked = answer.headers().get_all(WWW_AUTHENTICATE);
        let asked = asked.iter().filter_map(|h| challenge(h.to_str().ok()?));
        // If a registry offers both, use the token.
        let asked = asked.max_by_key(|c| matches!(c, Challenge::Bearer { .. }));
        let authorization = match asked {
            None => return Ok(false),
            Some(Challenge::Basic) => match self.basic(&self.registry)? {
                None => return Ok(false),
                basic => basic,
            },
            Some(Challenge::Bearer { realm, service }) => {
                let token = self.token(&realm, service.as_deref()).await?;
                // A token with a line break or the like is not a valid header.
                let header = HeaderValue::from_str(&format!("Bearer {token}"));
                Some(header.map_err(|_| self.no_access("its token is no token"))?)
            }
        };
        if let Ok(mut known) = self.authorization.lock() {
            *known = authorization;
        }
        Ok(true)
    }

    /// Returns the header with the password, if there is one.
    fn basic(&self, place: &Url) -> Result<Option<HeaderValue>, Error> {
        let Some((credentials, origin)) = &self.credentials else {
            return Ok(None);
        };
        if credentials.identity_token {
            return Err(
                self.no_access("it asks for a password, and the login is an identity token")
            );
        }
        self.may_have(place, *origin)?;
        let header = HeaderValue::from_str(&credentials.basic());
        let mut header = header.map_err(|_| self.no_access("the credentials are no header"))?;
        header.set_sensitive(true);
        Ok(Some(header))
    }

    fn may_have(&self, place: &Url, origin: RegistryOrigin) -> Result<(), Error> {
        may_have(place, &self.registry, self.transport, origin)
            .map_err(|reason| self.no_access(&reason.to_string()))
    }

    async fn token(&self, realm: &str, service: Option<&str>) -> Result<String, Error> {
        let step = "asking for a token";
        let realm = Url::parse(realm).map_err(|e| self.failed(step, format!("its realm: {e}")))?;
        let mut url = realm.clone();
        let identity = self.credentials.as_ref().filter(|(c, _)| c.identity_token);
        {
            let mut query = url.query_pairs_mut();
            query.append_pair("scope", &self.scope);
            if let Some(service) = service {
                query.append_pair("service", service);
            }
            if let Some((credentials, origin)) = identity {
                self.may_have(&realm, *origin)?;
                query.append_pair("grant_type", "refresh_token");
                query.append_pair("client_id", "cryopod");
                query.append_pair("refresh_token", &credentials.password);
            }
        }
        let mut request = match identity {
            // OAuth 2: a form, so that the token is in no log of addresses.
            Some(_) => self
                .direct
                .post(realm.clone())
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(url.query().unwrap_or_default().to_owned()),
            None => self.direct.get(url),
        };
        if identity.is_none()
            && let Some(basic) = self.basic(&realm)?
        {
            request = request.header(AUTHORIZATION, basic);
        }
        let answer = request.send().await.map_err(|e| self.unanswered(&e))?;
        if !answer.status().is_success() {
            return Err(self.no_access(&format!("{} says {}", realm, answer.status())));
        }
        let text = self.bounded(step, answer, MAX_TOKEN).await?;
        let token: Result<BearerToken, _> = serde_json::from_slice(&text);
        token
            .map(|t| t.token)
            .map_err(|_| self.failed(step, "the answer has none"))
    }

    /// Reads a whole answer. Fails with [`Error::Content`] as soon as it is larger than `max` bytes.
    pub(crate) async fn bounded(
        &self,
        step: &str,
        answer: Response,
        max: usize,
    ) -> Result<Vec<u8>, Error> {
        let mut all = Vec::new();
        let mut chunks = answer.bytes_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|e| self.failed(step, causes(&e)))?;
            if all.len() + chunk.len() > max {
                return Err(Error::Content {
                    image: self.image.to_string(),
                    reason: format!("{step}: the answer is larger than {max} bytes"),
                });
            }
            all.extend_from_slice(&chunk);
        }
        Ok(all)
    }

    fn unanswered(&self, error: &reqwest::Error) -> Error {
        if error.is_connect() {
            return Error::Connect {
                registry: self.image.resolve_registry().into(),
                reason: causes(error),
                tls: false,
            };
        }
        self.failed("asking the registry", causes(error))
    }

    fn failed(&self, step: &str, reason: impl Into<String>) -> Error {
        Error::Step {
            image: self.image.to_string(),
            step: step.into(),
            reason: reason.into(),
        }
    }

    fn no_access(&self, reason: &str) -> Error {
        Error::Access {
            image: self.image.to_string(),
            reason: shortened(reason),
        }
    }
}

/// Returns the first challenge of a header that we understand.
fn challenge(header: &str) -> Option<Challenge> {
    let parsed = http_auth::parse_challenges(header).ok()?;
    let mut known = parsed.iter().filter_map(|c| {
        let value = |name: &str| {
            let mut params = c.params.iter();
            let found = params.find(|(key, _)| key.eq_ignore_ascii_case(name))?;
            Some(found.1.to_unescaped())
        };
        if c.scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        c.scheme.eq_ignore_ascii_case("bearer").then_some(())?;
        Some(Challenge::Bearer {
            realm: value("realm")?,
            service: value("service"),
        })
    });
    known.next()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    #[test]
    fn challenges() {
        let bearer = r#"Bearer realm="https://a.example/t",service="s""#;
        let wanted = Challenge::Bearer {
            realm: "https://a.example/t".into(),
            service: Some("s".into()),
        };
        assert_eq!(challenge(bearer), Some(wanted));
        assert_eq!(challenge(r#"Basic realm="x""#), Some(Challenge::Basic));
        assert_eq!(challenge("Bearer"), None);
        assert_eq!(challenge("Digest x=1"), None);
        assert_eq!(challenge("\u{1}"), None);
    }

    /// A registry that gives these answers, one per connection, and returns the requests.
    fn registry(answers: Vec<String>) -> (u16, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let thread = std::thread::spawn(move || {
            let mut asked = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 4096];
                let n = stream.read(&mut request).unwrap();
                asked.push(String::from_utf8_lossy(&request[..n]).into_owned());
                let answer = answer.replace("PORT", &port.to_string());
                // The client hangs up when it has read enough.
                let _ = stream.write_all(answer.as_bytes());
            }
            asked
        });
        (port, thread)
    }

    fn answer(head: &str, body: &str) -> String {
        let length = body.len();
        format!("HTTP/1.1 {head}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
    }

    fn asks_for_a_token(realm: &str) -> String {
        let head = format!("401 Unauthorized\r\nWWW-Authenticate: Bearer realm=\"{realm}\"");
        answer(&head, "")
    }

    const REALM: &str = "http://127.0.0.1:PORT/token";

    fn get(port: u16, max: usize) -> Result<Vec<u8>, Error> {
        get_as(Login::parse("me:secret"), port, max)
    }

    fn get_as(login: Option<Login>, port: u16, max: usize) -> Result<Vec<u8>, Error> {
        let image = format!("127.0.0.1:{port}/a:1").parse().unwrap();
        let credentials = login.map(|c| (c, RegistryOrigin::Stored));
        let options = RegistryOptions {
            step_limit: Duration::from_secs(10),
            ..RegistryOptions::default()
        };
        crate::transfer::run(
            async {
                let session = RegistrySession::new(
                    &image,
                    Transport::Plain,
                    TokenAccess::Pull,
                    credentials,
                    &options,
                )?;
                let answer = session.get("x", "manifests/1", &["a/b"]).await?;
                session.bounded("x", answer, max).await
            },
            "test",
        )
    }

    #[test]
    fn an_identity_token_is_exchanged_and_never_sent_as_a_password() {
        let login = || {
            Some(Login {
                user: "me".into(),
                password: "s e&cret".into(),
                identity_token: true,
            })
        };
        let (port, thread) = registry(vec![
            asks_for_a_token(REALM),
            answer("200 OK", r#"{"access_token": "abc"}"#),
            answer("200 OK", "manifest"),
        ]);
        assert_eq!(get_as(login(), port, 100).unwrap(), b"manifest");
        let asked = thread.join().unwrap();
        assert!(asked[1].starts_with("POST /token HTTP"), "{}", asked[1]);
        assert!(!asked[1].contains("uthorization"), "{}", asked[1]);
        let (_, form) = asked[1].split_once("\r\n\r\n").unwrap();
        for want in [
            "grant_type=refresh_token",
            "refresh_token=s+e%26cret",
            "scope=repository%3Aa%3Apull",
        ] {
            assert!(form.contains(want), "{form}");
        }
        assert!(asked[2].contains("Bearer abc"), "{}", asked[2]);
        let basic = answer(
            "401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"x\"",
            "",
        );
        let (port, thread) = registry(vec![basic]);
        let error = get_as(login(), port, 100).unwrap_err().to_string();
        assert!(error.contains("identity token"), "{error}");
        thread.join().unwrap();
    }

    #[test]
    fn a_redirect_takes_no_login_elsewhere() {
        let login = Login {
            user: "me".into(),
            password: "secret".into(),
            identity_token: true,
        };
        let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
        elsewhere.set_nonblocking(true).unwrap();
        let head = format!(
            "307 Temporary Redirect\r\nLocation: http://{}/",
            elsewhere.local_addr().unwrap()
        );
        let (port, thread) = registry(vec![asks_for_a_token(REALM), answer(&head, "")]);
        let said = get_as(Some(login), port, 100).unwrap_err().to_string();
        assert!(said.contains("307"), "{said}");
        thread.join().unwrap();
        assert!(elsewhere.accept().is_err());
    }

    #[test]
    fn a_blob_may_be_sent_for_longer_than_a_pause_may_last() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut seen = Vec::new();
            while !seen.ends_with(b"12345") {
                let mut piece = [0; 4096];
                let n = stream.read(&mut piece).unwrap();
                if n == 0 {
                    return;
                }
                seen.extend_from_slice(&piece[..n]);
            }
            stream
                .write_all(answer("201 Created", "").as_bytes())
                .unwrap();
        });
        let options = RegistryOptions {
            stall_limit: Duration::from_millis(300),
            ..RegistryOptions::default()
        };
        let image = format!("{address}/a:1").parse().unwrap();
        let sent = crate::transfer::run(
            async {
                let (transport, access) = (Transport::Plain, TokenAccess::Push);
                let session = RegistrySession::new(&image, transport, access, None, &options)?;
                let pieces = futures_util::stream::iter(["1", "2", "3", "4", "5"]).then(
                    |piece| async move {
                        tokio::time::sleep(Duration::from_millis(150)).await;
                        Ok::<_, std::io::Error>(piece)
                    },
                );
                let place = Url::parse(&format!("http://{address}/upload")).unwrap();
                let body = Body::wrap_stream(pieces);
                session.send_blob("x", place, 5, body).await
            },
            "test",
        );
        sent.unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn a_token_is_asked_for_and_used() {
        let (port, thread) = registry(vec![
            asks_for_a_token(REALM),
            answer("200 OK", r#"{"token": "abc", "expires_in": 60}"#),
            answer("200 OK", "manifest"),
        ]);
        assert_eq!(get(port, 100).unwrap(), b"manifest");
        let asked = thread.join().unwrap();
        assert!(!asked[0].contains("uthorization"), "{}", asked[0]);
        assert!(asked[1].contains("GET /token?scope=repository%3Aa%3Apull "));
        assert!(asked[1].contains("Basic bWU6c2VjcmV0") || asked[1].contains("basic"));
        assert!(asked[2].contains("Bearer abc"), "{}", asked[2]);
    }

    #[test]
    fn a_realm_elsewhere_without_tls_gets_no_password() {
        let (port, thread) = registry(vec![asks_for_a_token("http://127.0.0.1:1/token")]);
        let said = get(port, 100).unwrap_err().to_string();
        assert!(said.contains("not over TLS"), "{said}");
        assert_eq!(thread.join().unwrap().len(), 1);
    }

    #[test]
    fn answers_without_end_and_tokens_that_are_none() {
        let large = "x".repeat(2 << 20);
        let (port, _) = registry(vec![answer("200 OK", &large)]);
        let said = get(port, 1 << 20).unwrap_err().to_string();
        assert!(said.contains("larger than 1048576 bytes"), "{said}");
        let (port, _) = registry(vec![asks_for_a_token(REALM), answer("200 OK", &large)]);
        let said = get(port, 100).unwrap_err().to_string();
        assert!(said.contains("larger than 262144 bytes"), "{said}");
        for token in [r#"{"token": "a\nb"}"#, "{}", "[]"] {
            let (port, _) = registry(vec![asks_for_a_token(REALM), answer("200 OK", token)]);
            assert!(get(port, 100).is_err());
        }
        // An error's text is left out if it is large.
        let (port, _) = registry(vec![answer("500 Oops", &large)]);
        assert!(get(port, 100).unwrap_err().to_string().contains("500"));
    }
}
