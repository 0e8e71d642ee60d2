//! x
use weir_agent::{
    domain::workload::{PodUid, WorkloadInfo},
    kernel::Objects,
    redirect::*,
};
use weir_tests::world::*;

#[test]
fn smoke() {
    let world = World::new().unwrap();
    let pod = world.pod("a", Families::Dual).unwrap();
    let settings = Settings { root: PIN_ROOT.into(), proc: "/proc".into(), dns: true };
    let r = match Redirector::open(settings, &Objects::get().unwrap(), world.node.netns()) {
        Ok(r) => r,
        Err(e) => panic!("{e}"),
    };
    let owner = Owner {
        uid: PodUid::from("u1"),
        info: WorkloadInfo { name: "a".into(), namespace: "n".into(), service_account: "s".into() },
    };
    for _ in 0..3 {
        let t = std::time::Instant::now();
        if let Err(e) = r.prepare(&owner, pod.netns()) {
            let mut s: Option<&dyn std::error::Error> = Some(&e);
            while let Some(x) = s {
                println!("E {x}");
                s = x.source();
            }
            panic!()
        }
        println!("prepare {:?}", t.elapsed());
        let t = std::time::Instant::now();
        println!("{:?} {:?}", r.switch_on(pod.netns()).map_err(|e| e.to_string()), t.elapsed());
        let t = std::time::Instant::now();
        println!("verify {:?} {:?}", r.verify(pod.netns()).map_err(|e| e.to_string()), t.elapsed());
        println!("{}", run_in(&pod, "sh", &["-c", "ip rule; ip -6 rule; ip route show table 15001; ip -6 route show table 15001; tc filter show dev eth0 ingress; tc filter show dev eth0 egress; tc filter show dev lo ingress"]).unwrap());
        r.drain(pod.netns()).unwrap();
        let t = std::time::Instant::now();
        println!("off {:?} {:?}", r.switch_off(pod.netns()).map_err(|e| e.to_string()), t.elapsed());
        println!("{}", run_in(&pod, "sh", &["-c", "ip rule; ip route show table 15001; tc filter show dev eth0 ingress; tc qdisc; bpftool prog | grep -c tc"]).unwrap_or_default());
    }
}
