import sys, time, asyncio, torch, uvloop
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
import services.expert_shard.core as _c
import services.expert_shard.forwarder as F
import meshfire.worker.hop_flow as flow
import meshfire.worker.hop_link as link
import tests.bench.expert_hop as b
_c.weighted_sum=lambda h,i,w,e: torch.zeros(h.shape,dtype=torch.int64)
ns=time.perf_counter_ns
if len(sys.argv)>1 and sys.argv[1]=="--serve":
    b.INNER=16
    import services.expert_shard.server as S
    class P(F.Forwarder):
        def answer(self, request, arrived):
            s=ns(); r=super().answer(request, arrived); r.queue_ns=arrived; r.compute_ns=s; r.output.shape.append(ns()); return r
    S.Forwarder=P
    b.serve(*sys.argv[2:4]); sys.exit()
T={}
o=flow.HopFlow._submit_all
def sub(self,p,h): T['submit']=ns(); o(self,p,h)
flow.HopFlow._submit_all=sub
orx=link.ShardLink._receive
def rx(self,r):
    T['rx']=ns(); T['arr']=r.queue_ns; T['start']=r.compute_ns; 
    if r.HasField('output'):
        sh=list(r.output.shape); T['end']=sh.pop(); del r.output.shape[-1]
    orx(self,r)
link.ShardLink._receive=rx
b.INNER=16
import subprocess
src=b.shard_processes
from contextlib import contextmanager
@contextmanager
def procs(n,url):
    ids=[f"expert-{i}" for i in range(n)]
    ps=[subprocess.Popen([sys.executable,"-m","tests.bench.zz_uv","--serve",i,url]) for i in ids]
    try: yield ids
    finally:
        for p in ps: p.terminate()
        for p in ps: p.wait()
b.shard_processes=procs
names=['t0','disp','submit','arr','start','end','rx','done']
def seg(experts):
    step=b.step_of(1); rows=[]
    for k in range(1500):
        s=experts.session(deadline=time.monotonic()+60)
        T['t0']=ns(); p=s.dispatch(0,*step); T['disp']=ns(); p.result(); T['done']=ns()
        if k>200: rows.append([T[n] for n in names])
    for i,n in enumerate(names[1:],1):
        d=sorted((r[i]-r[i-1])/1e3 for r in rows); print(f"{names[i-1]:>7}->{n:7} p50 {d[len(d)//2]:8.1f} min {d[0]:8.1f} p90 {d[int(len(d)*.9)]:8.1f}")
    d=sorted((r[-1]-r[0])/1e3 for r in rows); print('total p50',d[len(d)//2],'min',d[0])
async def one(experts,thread,*a): await thread.run(seg,experts); return {}
b.one_case=one
asyncio.run(b.cases_of(1,[1],1))
