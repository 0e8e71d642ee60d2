//! Query parameters and headers: what a list or a watch asks for.

use std::{collections::HashMap, time::Duration};

use super::{
    error::ApiError,
    object::{Key, Shape},
    resource::Route,
    selector::Filter,
};

/// Longest a watch lives when its client does not say.
const WATCH: Duration = Duration::from_secs(1800);

/// A list as asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ListRequest {
    pub filter: Filter,
    /// At exactly this version; the newest if absent.
    pub at: Option<u64>,
    /// Not older than this.
    pub at_least: u64,
    /// After this key: a further page.
    pub after: Option<Key>,
    pub limit: usize,
}

/// Where a watch starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// With every object there is, at a version not older than this, as events.
    State(u64),
    /// With what changes after this version; after now if absent.
    After(Option<u64>),
}

/// A watch as asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WatchRequest {
    pub filter: Filter,
    pub start: Start,
    pub bookmarks: bool,
    /// Tell by a bookmark when the objects there were have all been sent.
    pub mark_initial: bool,
    pub timeout: Duration,
}

/// Decoded query parameters.
pub(super) struct Params(HashMap<String, String>);

impl Params {
    pub(super) fn new(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(pairs.into_iter().filter(|(_, value)| !value.is_empty()).collect())
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.text(key).map(|value| matches!(value, "true" | "1" | "True" | "TRUE"))
    }

    fn number<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>, ApiError> {
        let parsed = self.text(key).map(str::parse).transpose();
        parsed.map_err(|_| ApiError::bad_request(format!("{key} is not a number")))
    }

    pub(super) fn is_watch(&self) -> bool {
        self.flag("watch") == Some(true)
    }

    /// Is it only to be tried? Nothing here can do that, and doing it would be worse than refusing.
    pub(super) fn is_dry_run(&self) -> bool {
        self.text("dryRun").is_some()
    }

    fn filter(&self, route: &Route) -> Result<Filter, ApiError> {
        let (labels, fields) = (self.text("labelSelector"), self.text("fieldSelector"));
        let namespace = route.namespace.as_deref();
        Filter::new(route.resource, namespace, labels.unwrap_or_default(), fields.unwrap_or_default())
            .map_err(ApiError::bad_request)
    }

    pub(super) fn list(&self, route: &Route) -> Result<ListRequest, ApiError> {
        let version: Option<u64> = self.number("resourceVersion")?;
        let mut request = ListRequest {
            filter: self.filter(route)?,
            at: None,
            at_least: 0,
            after: None,
            limit: self.number("limit")?.unwrap_or(0),
        };
        let rule = self.text("resourceVersionMatch");
        if let Some(token) = self.text("continue") {
            if rule.is_some() {
                return Err(ApiError::invalid_options("resourceVersionMatch", "forbidden with continue"));
            }
            if version.is_some_and(|version| version != 0) {
                return Err(ApiError::bad_request("a resourceVersion is not allowed with continue"));
            }
            let (at, after) = read_token(token).ok_or_else(|| ApiError::bad_request("invalid continue"))?;
            request.at = Some(at);
            request.after = Some(after);
            return Ok(request);
        }
        match (rule, version) {
            (None | Some("NotOlderThan"), Some(0)) => request.limit = 0,
            // Older than the parameter that says so: a page of a certain version.
            (None, Some(version)) if request.limit > 0 => request.at = Some(version),
            (None | Some("NotOlderThan"), Some(version)) => request.at_least = version,
            (Some("Exact"), Some(version)) if version > 0 => request.at = Some(version),
            (Some("Exact" | "NotOlderThan"), _) => {
                return Err(ApiError::invalid_options("resourceVersionMatch", "needs a resourceVersion"));
            }
            (Some(_), _) => return Err(ApiError::invalid_options("resourceVersionMatch", "unknown")),
            (None, None) => {}
        }
        Ok(request)
    }

    pub(super) fn watch(&self, route: &Route) -> Result<WatchRequest, ApiError> {
        let version = self.number("resourceVersion")?;
        let initial = self.flag("sendInitialEvents");
        match (initial, self.text("resourceVersionMatch")) {
            (None, None) | (Some(_), Some("NotOlderThan")) => {}
            (None, Some(_)) => {
                let why = "only with sendInitialEvents in a watch";
                return Err(ApiError::invalid_options("resourceVersionMatch", why));
            }
            (Some(_), _) => {
                let why = "must be NotOlderThan with sendInitialEvents";
                return Err(ApiError::invalid_options("resourceVersionMatch", why));
            }
        }
        let known = version.filter(|version| *version > 0);
        let start = match (initial, known) {
            (Some(true), _) => Start::State(known.unwrap_or(0)),
            (None, None) => Start::State(0),
            (Some(false), _) | (None, Some(_)) => Start::After(known),
        };
        let bookmarks = self.flag("allowWatchBookmarks") == Some(true);
        Ok(WatchRequest {
            filter: self.filter(route)?,
            start,
            bookmarks,
            mark_initial: bookmarks && initial == Some(true),
            timeout: self
                .number("timeoutSeconds")?
                .filter(|seconds| *seconds > 0)
                .map_or(WATCH, Duration::from_secs),
        })
    }
}

/// The token that continues a list after a key.
pub(super) fn write_token(version: u64, after: &Key) -> String {
    format!("{version}/{}/{}", after.namespace, after.name)
}

fn read_token(token: &str) -> Option<(u64, Key)> {
    let mut parts = token.splitn(3, '/');
    Some((parts.next()?.parse().ok()?, Key::new(parts.next()?, parts.next()?)))
}

/// The shape asked for by an `Accept` header, of a list or of single objects.
pub(super) fn shape(accept: Option<&str>, list: bool) -> Result<Shape, ApiError> {
    let plain = if list { Shape::Item } else { Shape::Whole };
    let Some(accept) = accept else { return Ok(plain) };
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        if !matches!(parts.next(), Some("application/json" | "application/*" | "*/*")) {
            continue;
        }
        let parameters: HashMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
        let whose = (parameters.get("g").copied(), parameters.get("v").copied());
        match parameters.get("as").copied() {
            None => return Ok(plain),
            Some("PartialObjectMetadataList") if list && whose == (Some("meta.k8s.io"), Some("v1")) => {
                return Ok(Shape::Metadata);
            }
            Some("PartialObjectMetadata") if !list && whose == (Some("meta.k8s.io"), Some("v1")) => {
                return Ok(Shape::Metadata);
            }
            // Tables, or the list form for an object: perhaps the next range can be served.
            Some(_) => {}
        }
    }
    Err(ApiError::with_code(406, "only JSON is served, of objects or of their metadata"))
}

#[cfg(test)]
mod tests {
    use super::{super::resource::Resource, *};

    fn pods() -> Route {
        Route { resource: Resource::Pods, namespace: None, name: None, status: false }
    }

    fn params(text: &str) -> Params {
        Params::new(
            text.split('&').filter_map(|pair| {
                pair.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
            }),
        )
    }

    #[test]
    fn lists() {
        let filter = Filter::default;
        let plain = |at, at_least, limit| ListRequest { filter: filter(), at, at_least, after: None, limit };
        let table = [
            ("", Some(plain(None, 0, 0))),
            ("limit=5", Some(plain(None, 0, 5))),
            ("resourceVersion=0&limit=5", Some(plain(None, 0, 0))),
            ("resourceVersion=7", Some(plain(None, 7, 0))),
            ("resourceVersion=7&resourceVersionMatch=NotOlderThan&limit=5", Some(plain(None, 7, 5))),
            ("resourceVersion=7&limit=5", Some(plain(Some(7), 0, 5))),
            ("resourceVersion=7&resourceVersionMatch=Exact", Some(plain(Some(7), 0, 0))),
            ("resourceVersion=0&resourceVersionMatch=Exact", None),
            ("resourceVersionMatch=NotOlderThan", None),
            ("resourceVersion=7&resourceVersionMatch=Newest", None),
            ("resourceVersion=x", None),
            ("continue=7/a/b&resourceVersion=7", None),
            ("continue=7/a/b&resourceVersionMatch=Exact", None),
            ("continue=x", None),
        ];
        for (text, want) in table {
            assert_eq!(params(text).list(&pods()).ok(), want, "{text}");
        }
        let page = params("continue=7/a/b&limit=5").list(&pods()).unwrap();
        assert_eq!((page.at, page.after, page.limit), (Some(7), Some(Key::new("a", "b")), 5));
        assert_eq!(read_token(&write_token(7, &Key::new("", "b"))), Some((7, Key::new("", "b"))));
    }

    #[test]
    fn watches() {
        let table = [
            ("", Some((Start::State(0), false))),
            ("resourceVersion=0", Some((Start::State(0), false))),
            ("resourceVersion=7", Some((Start::After(Some(7)), false))),
            ("resourceVersionMatch=NotOlderThan", None),
            ("sendInitialEvents=true", None),
            ("sendInitialEvents=true&resourceVersionMatch=Exact", None),
            ("sendInitialEvents=true&resourceVersionMatch=NotOlderThan", Some((Start::State(0), false))),
            (
                "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion=7",
                Some((Start::State(7), true)),
            ),
            ("sendInitialEvents=false&resourceVersionMatch=NotOlderThan", Some((Start::After(None), false))),
        ];
        for (text, want) in table {
            let got = params(text).watch(&pods()).ok();
            assert_eq!(got.map(|request| (request.start, request.mark_initial)), want, "{text}");
        }
        assert_eq!(params("timeoutSeconds=3").watch(&pods()).unwrap().timeout, Duration::from_secs(3));
    }

    #[test]
    fn accept() {
        const ONE: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        const LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";
        let table = [
            (None, Some(Shape::Whole), Some(Shape::Item)),
            (Some("application/json"), Some(Shape::Whole), Some(Shape::Item)),
            (Some("*/*"), Some(Shape::Whole), Some(Shape::Item)),
            (Some(ONE), Some(Shape::Metadata), None),
            (Some(LIST), None, Some(Shape::Metadata)),
            (Some("application/vnd.kubernetes.protobuf"), None, None),
        ];
        for (accept, one, list) in table {
            assert_eq!(shape(accept, false).ok(), one, "{accept:?}");
            assert_eq!(shape(accept, true).ok(), list, "{accept:?}");
        }
        assert_eq!(shape(Some(&format!("{TABLE}, application/json")), true), Ok(Shape::Item));
        assert_eq!(shape(Some(TABLE), true).unwrap_err().code, 406);
    }
}
