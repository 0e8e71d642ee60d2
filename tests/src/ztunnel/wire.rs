//! ZDS packets as ztunnel reads and writes them.
//!
//! Not the agent's codec on purpose: an error the two ends share would not show in any test.

use std::{error, fmt};

/// The packet a connection starts with: version 1.
pub const HELLO: &[u8] = &[0x08, 0x01];

/// Who a pod is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Pod name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its service account.
    pub service_account: String,
}

/// What the agent asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Serve a pod.
    Add {
        /// Which.
        uid: String,
        /// Who it is; without it ztunnel exits.
        info: Option<Info>,
    },
    /// Leave a pod running.
    Keep(String),
    /// Stop serving a pod.
    Del(String),
    /// Every pod has been named.
    SnapshotSent,
}

/// A packet that is no request.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(&'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl error::Error for Malformed {}

/// The answer to a request; an empty `error` is an ack.
pub fn answer(error: &str) -> Vec<u8> {
    let mut ack = Vec::new();
    if !error.is_empty() {
        put_bytes(&mut ack, 1, error.as_bytes());
    }
    let mut packet = Vec::new();
    put_bytes(&mut packet, 1, &ack);
    packet
}

/// Understands a packet of the agent.
pub fn decode(packet: &[u8]) -> Result<Request, Malformed> {
    let mut request = None;
    each_field(packet, |number, value| {
        request = Some(match number {
            1 => decode_add(value)?,
            2 => Request::Del(text_field(value, 2)?),
            3 => Request::SnapshotSent,
            5 => Request::Keep(text_field(value, 1)?),
            _ => return Ok(()),
        });
        Ok(())
    })?;
    request.ok_or(Malformed("no payload"))
}

fn decode_add(message: &[u8]) -> Result<Request, Malformed> {
    let mut info = None;
    each_field(message, |number, value| {
        if number == 2 {
            let (name, namespace) = (text_field(value, 1)?, text_field(value, 2)?);
            info = Some(Info { name, namespace, service_account: text_field(value, 3)? });
        }
        Ok(())
    })?;
    Ok(Request::Add { uid: text_field(message, 1)?, info })
}

fn text_field(message: &[u8], wanted: u64) -> Result<String, Malformed> {
    let mut text = String::new();
    each_field(message, |number, value| {
        if number == wanted {
            text = std::str::from_utf8(value).map_err(|_| Malformed("text is not UTF-8"))?.to_owned();
        }
        Ok(())
    })?;
    Ok(text)
}

/// Calls `field` for every length-delimited field; this protocol has no others but the hello's.
fn each_field(
    mut message: &[u8],
    mut field: impl FnMut(u64, &[u8]) -> Result<(), Malformed>,
) -> Result<(), Malformed> {
    while !message.is_empty() {
        let key = take_varint(&mut message)?;
        match key & 7 {
            0 => drop(take_varint(&mut message)?),
            2 => {
                let len = usize::try_from(take_varint(&mut message)?).unwrap_or(usize::MAX);
                let (value, rest) = message.split_at_checked(len).ok_or(Malformed("field is cut short"))?;
                field(key >> 3, value)?;
                message = rest;
            }
            _ => return Err(Malformed("strange wire type")),
        }
    }
    Ok(())
}

fn take_varint(message: &mut &[u8]) -> Result<u64, Malformed> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = message.split_first().ok_or(Malformed("number is cut short"))?;
        *message = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(Malformed("number without an end"))
}

fn put_bytes(message: &mut Vec<u8>, number: u8, value: &[u8]) {
    message.push(number << 3 | 2);
    let mut len = value.len();
    while len >= 0x80 {
        message.push(len as u8 | 0x80);
        len >>= 7;
    }
    message.push(len as u8);
    message.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_mean_what_the_protocol_says() {
        let info = Info { name: "n".into(), namespace: "ns".into(), service_account: "sa".into() };
        let add = Request::Add { uid: "u".into(), info: Some(info) };
        assert_eq!(decode(b"\x0a\x10\x0a\x01u\x12\x0b\x0a\x01n\x12\x02ns\x1a\x02sa"), Ok(add));
        let bare = Request::Add { uid: "u".into(), info: None };
        assert_eq!(decode(b"\x0a\x03\x0a\x01u"), Ok(bare));
        assert_eq!(decode(b"\x12\x03\x12\x01u"), Ok(Request::Del("u".into())));
        assert_eq!(decode(b"\x1a\x00"), Ok(Request::SnapshotSent));
        assert_eq!(decode(b"\x2a\x03\x0a\x01u"), Ok(Request::Keep("u".into())));
        for bad in [&b""[..], b"\xff", b"\x12\x05\x12", b"\x12\x03\x12\x01\xff", b"\x0d\x00\x00\x00\x00"] {
            assert!(decode(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn answers_are_what_the_agent_expects() {
        use weir_agent::zds::codec::{decode_answer, decode_hello};
        decode_hello(HELLO).unwrap();
        assert_eq!(answer(""), b"\x0a\x00");
        let long = "address in use ".repeat(200);
        assert_eq!(decode_answer(&answer(&long)).unwrap(), Err(long));
    }
}
