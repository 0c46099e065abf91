"""Evidence: views of the journal, for a person who asks what happened to a model.

    compile time                                         afterwards
    passes, rules, runtime  --records-->  Journal  -->   tables      text: print(report), graphex explain --full
    runner                  --snapshots-> its history    report/     sentences, data and one HTML page
                                                         explain     both, and a comparison with eager

Every stage of a compilation adds records to the journal: rewrites made and refused, near misses, captures, fallbacks.
The views compute nothing new; what they show is a record, a count or a snapshot.

Read `explain` first. It calls a model as it is and compiled, from one state: `reach` walks over everything a call can
reach and puts it back, `visible` observes it and compares. Then `tables`, then `report`.
"""
