//! What travels over the ZDS socket, one protobuf message a packet.
//!
//! The generated-looking types stay inside this file; everybody else speaks [`Request`] and [`Answer`].
//! Pure: part of the domain although it lives with the socket it serves.

use prost::Message;
use thiserror::Error;

use crate::domain::workload::{PodUid, WorkloadInfo};

/// ztunnel reads into a buffer of this size, and drops the connection over a longer packet.
pub const MAX_REQUEST: usize = 1024;

/// Only version there is.
const V1: i32 = 1;

mod wire {
    //! Messages of package `istio.workload.zds`, by hand: seven of them are not worth a build script.

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct ZdsHello {
        /// An enumeration upstream; as a number, because an unknown one has to be named in the error.
        #[prost(int32, tag = "1")]
        pub version: i32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct WorkloadRequest {
        #[prost(oneof = "Payload", tags = "1, 2, 3, 5")]
        pub payload: Option<Payload>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Payload {
        #[prost(message, tag = "1")]
        Add(AddWorkload),
        #[prost(message, tag = "2")]
        Del(DelWorkload),
        #[prost(message, tag = "3")]
        SnapshotSent(SnapshotSent),
        #[prost(message, tag = "5")]
        Keep(KeepWorkload),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct AddWorkload {
        #[prost(string, tag = "1")]
        pub uid: String,
        #[prost(message, optional, tag = "2")]
        pub workload_info: Option<WorkloadInfo>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct WorkloadInfo {
        #[prost(string, tag = "1")]
        pub name: String,
        #[prost(string, tag = "2")]
        pub namespace: String,
        #[prost(string, tag = "3")]
        pub service_account: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct KeepWorkload {
        #[prost(string, tag = "1")]
        pub uid: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct DelWorkload {
        #[prost(string, tag = "2")]
        pub uid: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct SnapshotSent {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct WorkloadResponse {
        #[prost(message, optional, tag = "1")]
        pub ack: Option<Ack>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Ack {
        #[prost(string, tag = "1")]
        pub error: String,
    }
}

/// What the agent asks of ztunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Serve a pod; the descriptor of its network namespace goes with the packet.
    Add {
        /// Which pod.
        uid: PodUid,
        /// Who it is. Not optional: ztunnel exits over an Add without it.
        info: WorkloadInfo,
    },
    /// Leave a pod running whose namespace cannot be opened right now. Only before [`Request::SnapshotSent`].
    Keep(PodUid),
    /// Stop serving a pod.
    Del(PodUid),
    /// All pods have been named; what runs and was not is cut. Once a connection.
    SnapshotSent,
}

/// How ztunnel answered: `Err` carries its own words.
pub type Answer = Result<(), String>;

/// A packet that means nothing.
#[derive(Debug, Error)]
pub enum DecodeError {
    /// No protobuf, or a field of the wrong type.
    #[error("not a message: {0}")]
    Malformed(#[from] prost::DecodeError),
    /// A message without anything in it.
    #[error("message without a payload")]
    Empty,
    /// A ztunnel of another protocol.
    #[error("protocol version {0}, this agent speaks {V1}")]
    Version(i32),
    /// An Add that does not say who the pod is.
    #[error("Add without workload info")]
    NoInfo,
}

impl Request {
    /// The packet.
    pub fn encode(&self) -> Vec<u8> {
        self.to_wire().encode_to_vec()
    }

    /// Length of the packet; more than [`MAX_REQUEST`] must not be sent.
    pub fn encoded_len(&self) -> usize {
        self.to_wire().encoded_len()
    }

    /// The other end's view of the packet.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        use wire::Payload;
        Ok(match wire::WorkloadRequest::decode(packet)?.payload.ok_or(DecodeError::Empty)? {
            Payload::Add(wire::AddWorkload { uid, workload_info }) => {
                let wire::WorkloadInfo { name, namespace, service_account } =
                    workload_info.ok_or(DecodeError::NoInfo)?;
                let info = WorkloadInfo { name, namespace, service_account };
                Self::Add { uid: uid.as_str().into(), info }
            }
            Payload::Del(m) => Self::Del(m.uid.as_str().into()),
            Payload::Keep(m) => Self::Keep(m.uid.as_str().into()),
            Payload::SnapshotSent(_) => Self::SnapshotSent,
        })
    }

    fn to_wire(&self) -> wire::WorkloadRequest {
        use wire::Payload;
        let payload = match self {
            Self::Add { uid, info } => Payload::Add(wire::AddWorkload {
                uid: uid.to_string(),
                workload_info: Some(wire::WorkloadInfo {
                    name: info.name.clone(),
                    namespace: info.namespace.clone(),
                    service_account: info.service_account.clone(),
                }),
            }),
            Self::Keep(uid) => Payload::Keep(wire::KeepWorkload { uid: uid.to_string() }),
            Self::Del(uid) => Payload::Del(wire::DelWorkload { uid: uid.to_string() }),
            Self::SnapshotSent => Payload::SnapshotSent(wire::SnapshotSent {}),
        };
        wire::WorkloadRequest { payload: Some(payload) }
    }
}

/// The packet ztunnel starts with.
pub fn encode_hello() -> Vec<u8> {
    wire::ZdsHello { version: V1 }.encode_to_vec()
}

/// Checks the first packet of a connection.
pub fn decode_hello(packet: &[u8]) -> Result<(), DecodeError> {
    match wire::ZdsHello::decode(packet)?.version {
        V1 => Ok(()),
        other => Err(DecodeError::Version(other)),
    }
}

/// The packet ztunnel answers a request with.
pub fn encode_answer(answer: &Answer) -> Vec<u8> {
    let error = answer.as_ref().err().cloned().unwrap_or_default();
    wire::WorkloadResponse { ack: Some(wire::Ack { error }) }.encode_to_vec()
}

/// Understands ztunnel's answer to a request.
pub fn decode_answer(packet: &[u8]) -> Result<Answer, DecodeError> {
    let wire::Ack { error } = wire::WorkloadResponse::decode(packet)?.ack.ok_or(DecodeError::Empty)?;
    Ok(if error.is_empty() { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> WorkloadInfo {
        WorkloadInfo { name: "n".into(), namespace: "ns".into(), service_account: "sa".into() }
    }

    /// The reference's own bytes: a change of these is a change of protocol.
    #[test]
    fn requests_are_these_bytes() {
        let cases: [(Request, &[u8]); 4] = [
            (
                Request::Add { uid: "u".into(), info: info() },
                b"\x0a\x10\x0a\x01u\x12\x0b\x0a\x01n\x12\x02ns\x1a\x02sa",
            ),
            (Request::Del("u".into()), b"\x12\x03\x12\x01u"),
            (Request::SnapshotSent, b"\x1a\x00"),
            (Request::Keep("u".into()), b"\x2a\x03\x0a\x01u"),
        ];
        for (request, bytes) in cases {
            assert_eq!(request.encode(), bytes, "{request:?}");
            assert_eq!(request.encoded_len(), bytes.len(), "{request:?}");
            assert_eq!(Request::decode(bytes).unwrap(), request);
        }
    }

    #[test]
    fn hello_and_answers_are_these_bytes() {
        assert_eq!(encode_hello(), b"\x08\x01");
        decode_hello(b"\x08\x01").unwrap();
        assert_eq!(encode_answer(&Ok(())), b"\x0a\x00");
        assert_eq!(decode_answer(b"\x0a\x00").unwrap(), Ok(()));
        assert_eq!(encode_answer(&Err("no".into())), b"\x0a\x04\x0a\x02no");
        assert_eq!(decode_answer(b"\x0a\x04\x0a\x02no").unwrap(), Err("no".to_owned()));
    }

    #[test]
    fn fields_of_a_later_version_are_skipped() {
        // trust_domain = 4 in the info, an unknown field 9 in the answer.
        let add = b"\x0a\x13\x0a\x01u\x12\x0e\x0a\x01n\x12\x02ns\x1a\x02sa\x22\x01t";
        assert_eq!(Request::decode(add).unwrap(), Request::Add { uid: "u".into(), info: info() });
        assert_eq!(decode_answer(b"\x0a\x00\x48\x01").unwrap(), Ok(()));
    }

    #[test]
    fn nonsense_is_an_error_of_its_kind() {
        assert!(matches!(decode_hello(b""), Err(DecodeError::Version(0))));
        assert!(matches!(decode_hello(b"\x08\x07"), Err(DecodeError::Version(7))));
        assert!(matches!(decode_hello(b"\xff"), Err(DecodeError::Malformed(_))));
        assert!(matches!(decode_answer(b"\x12\x00"), Err(DecodeError::Empty)));
        assert!(matches!(decode_answer(b"\x0a\x05\x0a"), Err(DecodeError::Malformed(_))));
        assert!(matches!(decode_answer(b"\x0a\x04\x0a\x02\xff\xfe"), Err(DecodeError::Malformed(_))));
        assert!(matches!(Request::decode(b""), Err(DecodeError::Empty)));
        assert!(matches!(Request::decode(b"\x0a\x03\x0a\x01u"), Err(DecodeError::NoInfo)));
    }

    #[test]
    fn arbitrary_packets_never_panic() {
        use rand::{Rng, SeedableRng};
        let mut random = rand::rngs::StdRng::seed_from_u64(5);
        for _ in 0..20_000 {
            let mut packet = vec![0; random.random_range(0..64)];
            random.fill(&mut packet[..]);
            let _ = (decode_hello(&packet), decode_answer(&packet), Request::decode(&packet));
        }
    }
}
