//! The DNS proxy on 15053: answers every question with an address made of the question itself.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
};

use super::{log::DnsQuery, proxy::Pod};

const HEADER: usize = 12;
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;
const CLASS_IN: u16 = 1;
const TTL: u32 = 30;
/// First label of a name that wants an answer of a certain size.
const SIZE: &str = "size-";
/// QR and RA; the opcode and RD are the query's own.
const RESPONSE: [u8; 2] = [0x80, 0x80];

/// A query for the v4 address of `name`, as a test would send it.
pub fn query(id: u16, name: &str) -> Vec<u8> {
    // RD set, one question, nothing else.
    let mut packet = [id.to_be_bytes(), [1, 0], [0, 1], [0; 2], [0; 2], [0; 2]].concat();
    for label in name.split('.').filter(|l| !l.is_empty()) {
        packet.push(u8::try_from(label.len()).expect("a label has at most 63 bytes"));
        packet.extend(label.as_bytes());
    }
    packet.push(0);
    packet.extend(TYPE_A.to_be_bytes());
    packet.extend(CLASS_IN.to_be_bytes());
    packet
}

/// A name whose answer takes exactly that many bytes, as one with many records would.
pub fn name_of_size(size: usize, name: &str) -> String {
    format!("{SIZE}{size}.{name}")
}

/// What a stand-in answers to a question for `name`: one of 192.0.2.0/24.
pub fn address_of(name: &str) -> Ipv4Addr {
    let mut hasher = DefaultHasher::new();
    name.trim_end_matches('.').to_ascii_lowercase().hash(&mut hasher);
    Ipv4Addr::new(192, 0, 2, (hasher.finish() % 254) as u8 + 1)
}

/// Id and v4 address of an answer, for the test that asked.
pub fn parse_answer(packet: &[u8]) -> Option<(u16, Ipv4Addr)> {
    let (_, end) = question(packet)?;
    let id = u16::from_be_bytes([packet[0], packet[1]]);
    // Name pointer, type, class, TTL and length stand before the address.
    let address: [u8; 4] = packet.get(end + 12..end + 16)?.try_into().ok()?;
    (packet[2] & RESPONSE[0] != 0).then_some((id, address.into()))
}

/// The answer to `packet` and the name it asks for. `None` for what is no query of one question.
pub fn answer(packet: &[u8]) -> Option<(Vec<u8>, String)> {
    let (name, end) = question(packet)?;
    let qtype = u16::from_be_bytes([packet[end - 4], packet[end - 3]]);
    let v4 = address_of(&name);
    let address = match qtype {
        TYPE_A => v4.octets().to_vec(),
        TYPE_AAAA => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, v4.octets()[3].into()).octets().to_vec(),
        _ => Vec::new(),
    };
    let mut response = packet[..end].to_vec();
    response[2] |= RESPONSE[0];
    response[3] = RESPONSE[1];
    // The answer's count; then no authority and nothing additional, whatever the query carried (EDNS).
    response[6..HEADER].copy_from_slice(&[0, u8::from(!address.is_empty()), 0, 0, 0, 0]);
    if !address.is_empty() {
        response.extend([0xc0, HEADER as u8]);
        response.extend(qtype.to_be_bytes());
        response.extend(CLASS_IN.to_be_bytes());
        response.extend(TTL.to_be_bytes());
        response.extend((address.len() as u16).to_be_bytes());
        response.extend(address);
    }
    let size = name.strip_prefix(SIZE).and_then(|rest| rest.split('.').next()?.parse().ok()).unwrap_or(0);
    pad(&mut response, size);
    Some((response, name))
}

/// Fills an answer up with an OPT record that has the padding option.
fn pad(response: &mut Vec<u8>, size: usize) {
    const RECORD: usize = 11;
    const OPTION: usize = 4;
    let Some(padding) = size.checked_sub(response.len() + RECORD + OPTION) else { return };
    // One additional record: root name, OPT, our size, no flags.
    response[HEADER - 1] = 1;
    response.extend([0, 0, 41, 0x10, 0, 0, 0, 0, 0]);
    response.extend(((OPTION + padding) as u16).to_be_bytes());
    response.extend([0, 12]);
    response.extend((padding as u16).to_be_bytes());
    response.resize(response.len() + padding, 0);
}

/// The dotted name of the only question and where its section ends.
fn question(packet: &[u8]) -> Option<(String, usize)> {
    let one_question = packet.get(4..6)? == [0, 1];
    let (mut name, mut at) = (String::new(), HEADER);
    loop {
        let len = usize::from(*packet.get(at)?);
        at += 1;
        if len == 0 {
            break;
        }
        if !name.is_empty() {
            name.push('.');
        }
        // A pointer (0xc0…) is longer than any label may be and finds nothing there.
        let label = packet.get(at..at + len).filter(|_| len < 64)?;
        name.push_str(std::str::from_utf8(label).ok()?);
        at += len;
    }
    (one_question && packet.len() >= at + 4).then_some((name, at + 4))
}

/// Answers on a UDP socket until dropped.
pub async fn serve_udp(pod: Arc<Pod>, socket: UdpSocket) {
    let mut buffer = [0; 4096];
    loop {
        // An ICMP error of an earlier answer is reported here; the socket is as good as before.
        let Ok((len, peer)) = socket.recv_from(&mut buffer).await else { continue };
        let Some((response, name)) = answer(&buffer[..len]) else { continue };
        pod.log.push_dns(DnsQuery { pod: pod.uid.clone(), peer, name, tcp: false });
        // One that cannot be answered asks again, as with any resolver.
        let _ = socket.send_to(&response, peer).await;
    }
}

/// Answers on one TCP connection to its end.
pub async fn serve_tcp(pod: Arc<Pod>, stream: TcpStream) {
    // No answer to give or nobody to give it to: either way the connection is over.
    let _: Option<()> = answer_on(&pod, stream).await;
}

async fn answer_on(pod: &Pod, mut stream: TcpStream) -> Option<()> {
    let peer = stream.peer_addr().ok()?;
    loop {
        let mut packet = vec![0; usize::from(stream.read_u16().await.ok()?)];
        stream.read_exact(&mut packet).await.ok()?;
        let (response, name) = answer(&packet)?;
        pod.log.push_dns(DnsQuery { pod: pod.uid.clone(), peer, name, tcp: true });
        let framed = [&(response.len() as u16).to_be_bytes()[..], &response].concat();
        stream.write_all(&framed).await.ok()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_carry_id_name_and_address() {
        let asked = query(0x1234, "web.prod.svc.cluster.local");
        let (response, name) = answer(&asked).unwrap();
        assert_eq!(name, "web.prod.svc.cluster.local");
        assert_eq!(response[HEADER..asked.len()], asked[HEADER..]);
        assert_eq!(parse_answer(&response), Some((0x1234, address_of("WEB.prod.svc.cluster.local."))));
        assert_eq!(parse_answer(&asked), None, "a query is no answer");
    }

    #[test]
    fn edns_of_the_query_is_not_taken_for_an_answer() {
        let mut asked = query(7, "a.example");
        let question_end = asked.len();
        asked[11] = 1;
        asked.extend([0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let (response, _) = answer(&asked).unwrap();
        assert_eq!(response.len(), question_end + 16);
        assert_eq!(response[6..HEADER], [0, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn answers_are_as_long_as_their_name_says() {
        for size in [100, 512, 4096, 60_000] {
            let name = name_of_size(size, "a.example");
            let (response, _) = answer(&query(7, &name)).unwrap();
            assert_eq!(response.len(), size);
            assert_eq!(parse_answer(&response), Some((7, address_of(&name))));
        }
    }

    #[test]
    fn anything_cut_short_is_no_question() {
        let asked = query(7, "a.example");
        for len in 0..asked.len() {
            assert!(answer(&asked[..len]).is_none(), "{len}");
        }
    }
}
