//! A strict netlink socket: every request is acknowledged, every answer is checked.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

/// A request was refused, or the conversation broke.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket cannot be used.
    #[error("netlink socket: {0}")]
    Socket(#[source] io::Error),
    /// The kernel refused.
    #[error("{what}: {source}")]
    Refused {
        /// What was asked.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// What came back is no answer.
    #[error("netlink answer: {0}")]
    Protocol(String),
}

impl NetlinkError {
    /// The errno of a refusal.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// One change, with the words an error would use for it.
pub struct Request<T> {
    /// What it does, for errors.
    pub what: String,
    /// The message.
    pub message: T,
    /// Flags besides REQUEST and ACK.
    pub flags: u16,
    /// An errno that means the wanted state is there already.
    pub tolerate: Option<i32>,
}

/// A netlink socket in the namespace of the thread that opened it.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

/// Larger than any answer of the kernel to the requests made here (it sends at most 32 KiB at once).
const BUFFER: usize = 64 * 1024;

/// Requests in one packet. The kernel answers all of a packet before anything of it can be read, and what does not
/// fit into the socket's buffer (208 KiB unless set) is lost with ENOBUFS.
const AT_ONCE: usize = 64;

impl Netlink {
    /// Opens a socket, for a protocol of `netlink_sys::protocols`.
    pub fn open(protocol: isize) -> Result<Self, NetlinkError> {
        let mut socket = Socket::new(protocol).map_err(NetlinkError::Socket)?;
        socket.bind_auto().map_err(NetlinkError::Socket)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(NetlinkError::Socket)?;
        // The kernel checks what dump requests ask for instead of ignoring what it does not know.
        socket.set_netlink_get_strict_chk(true).map_err(NetlinkError::Socket)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Makes all requests, many in one packet, and reads every acknowledgement. The first refusal is returned, after
    /// all answers are in: what could be done is done.
    pub fn apply<T>(&mut self, requests: Vec<Request<T>>) -> Result<(), NetlinkError>
    where
        T: NetlinkSerializable + NetlinkDeserializable,
    {
        let mut requests = requests.into_iter();
        let mut refused = Ok(());
        loop {
            let some: Vec<_> = requests.by_ref().take(AT_ONCE).collect();
            if some.is_empty() {
                return refused;
            }
            match self.apply_some(some) {
                Err(refusal @ NetlinkError::Refused { .. }) => refused = refused.and(Err(refusal)),
                other => other?,
            }
        }
    }

    fn apply_some<T>(&mut self, requests: Vec<Request<T>>) -> Result<(), NetlinkError>
    where
        T: NetlinkSerializable + NetlinkDeserializable,
    {
        let first = self.sequence.wrapping_add(1);
        let mut packet = Vec::new();
        let mut waiting = Vec::with_capacity(requests.len());
        for Request { what, message, flags, tolerate } in requests {
            self.append(&mut packet, message, flags | NLM_F_ACK);
            waiting.push(Some((what, tolerate)));
        }
        self.socket.send(&packet, 0).map_err(NetlinkError::Socket)?;
        let mut refused = None;
        let mut left = waiting.len();
        while left > 0 {
            for answer in self.receive::<T>()? {
                let index = answer.header.sequence_number.wrapping_sub(first) as usize;
                let NetlinkPayload::Error(error) = answer.payload else {
                    return Err(NetlinkError::Protocol("not an acknowledgement".into()));
                };
                let Some((what, tolerate)) = waiting.get_mut(index).and_then(Option::take) else {
                    return Err(NetlinkError::Protocol("an acknowledgement nobody waits for".into()));
                };
                left -= 1;
                let errno = error.code.map_or(0, |code| -code.get());
                if errno != 0 && Some(errno) != tolerate && refused.is_none() {
                    refused =
                        Some(NetlinkError::Refused { what, source: io::Error::from_raw_os_error(errno) });
                }
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Asks for everything of one kind.
    pub fn dump<T>(&mut self, what: &str, message: T) -> Result<Vec<T>, NetlinkError>
    where
        T: NetlinkSerializable + NetlinkDeserializable,
    {
        let mut packet = Vec::new();
        self.append(&mut packet, message, NLM_F_DUMP);
        self.socket.send(&packet, 0).map_err(NetlinkError::Socket)?;
        let mut all = Vec::new();
        loop {
            for answer in self.receive::<T>()? {
                if answer.header.sequence_number != self.sequence {
                    return Err(NetlinkError::Protocol("an answer to another question".into()));
                }
                match answer.payload {
                    NetlinkPayload::InnerMessage(message) => all.push(message),
                    NetlinkPayload::Done(_) => return Ok(all),
                    NetlinkPayload::Error(error) => {
                        let errno = error.code.map_or(0, |code| -code.get());
                        let source = io::Error::from_raw_os_error(errno);
                        return Err(NetlinkError::Refused { what: what.to_owned(), source });
                    }
                    _ => return Err(NetlinkError::Protocol("an answer of unknown kind".into())),
                }
            }
        }
    }

    /// Asks for one thing.
    pub fn ask<T>(&mut self, what: &str, message: T) -> Result<T, NetlinkError>
    where
        T: NetlinkSerializable + NetlinkDeserializable,
    {
        let mut packet = Vec::new();
        self.append(&mut packet, message, 0);
        self.socket.send(&packet, 0).map_err(NetlinkError::Socket)?;
        match self.receive::<T>()?.pop().map(|answer| answer.payload) {
            Some(NetlinkPayload::InnerMessage(message)) => Ok(message),
            Some(NetlinkPayload::Error(error)) => {
                let errno = error.code.map_or(0, |code| -code.get());
                let source = io::Error::from_raw_os_error(errno);
                Err(NetlinkError::Refused { what: what.to_owned(), source })
            }
            _ => Err(NetlinkError::Protocol("an answer of unknown kind".into())),
        }
    }

    fn append<T: NetlinkSerializable>(&mut self, packet: &mut Vec<u8>, message: T, flags: u16) {
        crate::work::NETLINK.add(1);
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        let start = packet.len();
        // Messages of a packet start at multiples of four.
        packet.resize(start + message.buffer_len().next_multiple_of(4), 0);
        message.serialize(&mut packet[start..]);
    }

    fn receive<T: NetlinkDeserializable>(&mut self) -> Result<Vec<NetlinkMessage<T>>, NetlinkError> {
        let mut buffer = Vec::with_capacity(BUFFER);
        self.socket.recv(&mut buffer, 0).map_err(NetlinkError::Socket)?;
        let mut messages = Vec::new();
        let mut rest = buffer.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::deserialize(rest)
                .map_err(|error| NetlinkError::Protocol(error.to_string()))?;
            let length = (message.header.length as usize).next_multiple_of(4);
            rest = rest.get(length.max(16)..).unwrap_or_default();
            messages.push(message);
        }
        Ok(messages)
    }
}
