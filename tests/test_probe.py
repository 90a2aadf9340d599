import sys; sys.path.insert(0,'/work/main')
from collections import Counter
import tests.model.batches as b
C=Counter()
orig=b._decide
def d(model, owner, tenant, requests, plain, atomic, linked, assigned):
    r=orig(model, owner, tenant, requests, plain, atomic, linked, assigned)
    C['batches']+=1; C[f'plain{len(plain)}']+=1
    if len(plain)>1: C['mixed' if any(a.granted for a in r.values()) and any(not a.granted for a in r.values()) else 'allgranted' if r and all(a.granted for a in r.values()) else 'allrefused']+=1
    return r
b._decide=d
orig2=b._is_plain
def p(*a):
    x=orig2(*a); C['settleplain' if x else 'settleodd']+=1; return x
b._is_plain=p
import tests.model.test_machine as t
class Null:
    pass
import psycopg
import os
@__import__('pytest').fixture(autouse=True)
def pr():
    yield
    print(C)
@__import__('pytest').mark.timeout(900)
def test_probe(conn):
    t.play(b.BatchEngine(conn), b.BatchHistories, __import__('hypothesis').settings(derandomize=False, max_examples=int(os.environ.get('N','60')), stateful_step_count=30, deadline=None, database=None, suppress_health_check=list(t.HealthCheck), phases=[__import__('hypothesis').Phase.generate]))

