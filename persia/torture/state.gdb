# What a role waits for: its threads, and what it knows of batches.
#   gdb -p PID -batch -iex "set auto-solib-add off" -x persia/torture/state.gdb
set pagination off
sharedlibrary libpersia
thread apply all bt 14
python
def listed(at, link="next"):
    while int(at):
        yield at
        at = at[link]

def show(kind, one, names):
    print(kind, *(f"{n}={one[n]}" for n in names.split()))

def show_offer(kind, one):
    m = one["m"]
    print(kind, f"stream={int(m['stream']):x}", f"number={m['number']}",
          f"place={m['place']}", f"attempt={m['attempt']}",
          f"settled={one['settled']}", f"expired={one['expired']}",
          f"state={one['state']}", f"client={one['client']}")

def show_service(s):
    print("SERVICE", s["stats"])
    for j in listed(s["job_list"]):
        show("JOB", j, "id generation over beyond world streams_ever counts")
    for t in listed(s["streams"]):
        show("STREAM", t, "name client former state first own ends_n "
             "shared waits offers settled")
        print("  done to", t["done"]["watermark"], "came to",
              t["came"]["watermark"])
    for name in ("queue", "leased"):
        for o in listed(s[name]):
            show_offer(name.upper(), o)
    for r in listed(s["ranks"]):
        show("RANK", r, "rank client epoch generation next_epoch "
             "next_place held_n")
    for t in listed(s["takes"]):
        print("TAKE", t["m"]["take"])

def show_rank(r):
    show("PASS", r, "job first epoch over again begun number generation "
         "place used ordered backs backs_ended missing_since")
    for i in range(int(r["c"]["links_n"])):
        show("LINK", r["c"]["links"][i], "address boot")
        show("  AT", r["at"][i], "boot ended idle parts_n")
        print("  home", r["homes"][i])
        for k in range(int(r["at"][i]["parts_n"])):
            p = r["at"][i]["parts"][k]
            print("  PART", p["stream"], p["settled"], p["last"],
                  p["window"][0])
    for name, link in (("takes", "takes_next"), ("held", "held_next")):
        for t in listed(r[name], link):
            show(name.upper(), t, "number generation place tries look state "
                 "held")
            print("  status", t["m"]["status"], "batch", t["m"]["number"])

def show_sender(s):
    show("SENDER", s, "stream number before first epoch ends_n waits unsure "
         "claimed broken none_first none pin lineage")
    print("  done to", s["done"]["watermark"], s["counts"])
    for k in listed(s["kept"]):
        show("KEPT", k, "number at boot")

def show_client(c):
    owner = c["owner"]
    kind = str(c["meet"])
    if "sender_meet" in kind:
        show_sender(owner.cast(gdb.lookup_type("loader_sender").pointer()))
    else:
        show_rank(owner.cast(gdb.lookup_type("rank_taker").pointer()))

for thread in gdb.selected_inferior().threads():
    thread.switch()
    frame = gdb.newest_frame()
    while frame:
        if frame.name() == "timer_main":
            timer = frame.read_var("timer").cast(
                gdb.lookup_type("persia_timer").pointer())
            of = gdb.find_pc_line(int(timer["tick"])).symtab.filename
            if of.endswith("embedding_worker/service.c"):
                show_service(timer["ctx"].cast(
                    gdb.lookup_type("embedding_worker").pointer()))
            elif of.endswith("link/link.c"):
                show_client(timer["ctx"].cast(
                    gdb.lookup_type("worker_client").pointer()))
        frame = frame.older()
end
