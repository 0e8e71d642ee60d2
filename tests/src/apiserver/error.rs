//! Failures, as the `Status` object clients get.

use serde_json::{Value, json};

use super::resource::Resource;

/// A request that failed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub code: u16,
    reason: &'static str,
    message: String,
    details: Value,
    /// Seconds, for the header of that name.
    pub retry_after: Option<u32>,
}

impl ApiError {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null, retry_after: None }
    }

    fn about(mut self, resource: Resource, name: &str) -> Self {
        self.details = json!({ "name": name, "kind": resource.plural() });
        if !resource.group().is_empty() {
            self.details["group"] = resource.group().into();
        }
        self
    }

    fn retry_after(mut self, seconds: u32) -> Self {
        if self.details.is_null() {
            self.details = json!({});
        }
        self.details["retryAfterSeconds"] = seconds.into();
        self.retry_after = Some(seconds);
        self
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(super) fn not_found(resource: Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", resource.plural());
        Self::new(404, "NotFound", message).about(resource, name)
    }

    pub(super) fn no_such_path() -> Self {
        Self::new(404, "NotFound", "nothing is served at this path")
    }

    pub(super) fn already_exists(resource: Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", resource.plural());
        Self::new(409, "AlreadyExists", message).about(resource, name)
    }

    pub(super) fn conflict(resource: Resource, name: &str, why: &str) -> Self {
        let message = format!("{} \"{name}\" cannot be written: {why}", resource.plural());
        Self::new(409, "Conflict", message).about(resource, name)
    }

    pub(super) fn invalid(resource: Resource, name: &str, field: &str, why: &str) -> Self {
        let message = format!("{} \"{name}\" is invalid: {field}: {why}", resource.kind());
        let mut error = Self::new(422, "Invalid", message).about(resource, name);
        error.details["kind"] = resource.kind().into();
        error.details["causes"] = json!([{ "reason": "FieldValueInvalid", "message": why, "field": field }]);
        error
    }

    pub(super) fn invalid_options(field: &str, why: &str) -> Self {
        let mut error = Self::new(422, "Invalid", format!("ListOptions is invalid: {field}: {why}"));
        error.details = json!({
            "group": "meta.k8s.io", "kind": "ListOptions",
            "causes": [{ "reason": "FieldValueForbidden", "message": why, "field": field }],
        });
        error
    }

    /// History from `asked` on is forgotten.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// `asked` is of the future.
    pub(super) fn too_large(asked: u64, current: u64) -> Self {
        let message = format!("Too large resource version: {asked}, current: {current}");
        let mut error = Self::new(504, "Timeout", message).retry_after(1);
        error.details["causes"] =
            json!([{ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" }]);
        error
    }

    /// What an injected fault answers.
    pub(super) fn injected(code: u16) -> Self {
        let reason = match code {
            400 => "BadRequest",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "NotFound",
            405 => "MethodNotAllowed",
            406 => "NotAcceptable",
            409 => "Conflict",
            410 => "Expired",
            415 => "UnsupportedMediaType",
            422 => "Invalid",
            429 => "TooManyRequests",
            500 => "InternalError",
            503 => "ServiceUnavailable",
            504 => "Timeout",
            _ => "",
        };
        let error = Self::new(code, reason, "injected fault");
        if code == 429 { error.retry_after(1) } else { error }
    }

    pub(super) fn with_code(code: u16, message: impl Into<String>) -> Self {
        let mut error = Self::injected(code);
        error.message = message.into();
        error
    }

    /// The `Status` object.
    pub(super) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Failure", "message": self.message, "reason": self.reason, "code": self.code,
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}
